"""Bias-dropout-add: the last step of attention and MLP blocks in a Megatron transformer layer."""

from __future__ import annotations

import torch

from npu_ops.core import check, rng
from npu_ops.core.registry import explains
from npu_ops.ops.bias_dropout_add import gradients, op  # noqa: F401

__all__ = ["bias_dropout_add"]


def bias_dropout_add(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    p: float,
    training: bool,
    *,
    dtype: torch.dtype | None = None,
    inplace: bool = False,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Compute `residual + dropout(x + bias, p)` in fp32 (fp64 if an input is) and round once.

    The dropout mask is never stored: the backward draws it again from a seed and an offset. The
    forward draws these two numbers from the generator and so advances it. A recomputation that
    restores the generator repeats the mask.

    Args:
        x: `[..., h]`, float32, bfloat16, float16 or float64.
        bias: None, `[h]`, or x's shape.
        residual: x's shape. x, bias and residual may differ in dtype.
        p: probability of dropping an element, 0 <= p < 1, in steps of 2**-16. Kept elements are
            divided by the exact probability of being kept, so the expectation is exact.
        training: drop only if true.
        dtype: of the result; None: the residual's.
        inplace: write the result into x and return x.
        generator: on x's device; None: its default generator.

    Returns:
        `[..., h]` of `dtype`. Gradients of x, bias and residual have their own dtypes; the gradient
        of a `[h]` bias is summed in fp32.

    Raises:
        TypeError: x, bias or residual is no floating tensor, `dtype` is no floating dtype, or
            generator is no torch.Generator.
        ValueError: p, a shape or a device is invalid; or `inplace` is set and x cannot hold the
            result (another dtype, expanded memory) or a gradient is needed.

    Source: Megatron-LM `megatron/core/fusions/fused_bias_dropout.py`.
    """
    x, bias, residual, drops, p, dtype = _prepare(
        x, bias, residual, p, training, dtype, inplace, generator
    )
    state = rng.new_state(x.device, generator) if drops else None
    if inplace:
        op.in_place(x, bias, residual, state, p)
        return x
    return op.forward(x, bias, residual, state, p, dtype)


def _prepare(x, bias, residual, p, training, dtype=None, inplace=False, generator=None):
    """Check the arguments; return x, bias, residual, whether to drop elements, p and dtype."""
    check.floating("x", x)
    check.floating("residual", residual)
    if x.dim() == 0:
        raise check.shape("x", x, "at least one dimension")
    if residual.shape != x.shape:
        raise check.shape("residual", residual, f"x's shape {list(x.shape)}")
    check.same_device("residual", residual, "x", x)
    _check_bias(bias, x)
    check.number("p", p, 0, 1, "0 <= p < 1")
    dtype = residual.dtype if dtype is None else dtype
    check.float_dtype("dtype", dtype)
    if inplace:
        _check_inplace(x, bias, residual, dtype)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator: got {type(generator).__name__}, needs a torch.Generator")
    if generator is not None and generator.device.type != x.device.type:
        raise ValueError(f"generator: got device {generator.device}, needs x's {x.device}")
    return x, bias, residual, bool(training) and p > 0, float(p), dtype


def _check_bias(bias, x):
    if bias is None:
        return
    check.floating("bias", bias)
    if bias.shape != x.shape and bias.shape != x.shape[-1:]:
        raise check.shape("bias", bias, f"[{x.shape[-1]}] or x's shape {list(x.shape)}")
    check.same_device("bias", bias, "x", x)


def _check_inplace(x, bias, residual, dtype):
    if dtype != x.dtype:
        raise ValueError(
            f"inplace: got True, needs x of the result's dtype {check.short(dtype)}, not "
            f"{check.short(x.dtype)}"
        )
    if not x.is_contiguous():
        raise ValueError("inplace: got True, needs a contiguous x")
    check.inplace({"x": x}, {"bias": bias, "residual": residual}, elementwise=True)


def _operator_args(*args, **kwargs):
    x, bias, residual, _, p, dtype = _prepare(*args, **kwargs)
    return x, bias, residual, None, p, dtype


explains("bias_dropout_add", op.forward, _operator_args)
