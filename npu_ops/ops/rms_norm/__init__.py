"""Computes RMSNorm, with or without a preceding addition of a residual."""

from __future__ import annotations

import torch

from npu_ops.core import check
from npu_ops.core.registry import explains
from npu_ops.ops.rms_norm import op

__all__ = ["rms_norm", "add_rms_norm"]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, *, zero_centered: bool = False
) -> torch.Tensor:
    """Compute `x / sqrt(mean(x^2) + eps) * weight` over the last dimension.

    It computes in fp32 (float64: in float64) and rounds once. transformers' Llama and Qwen3 round
    to x's dtype before they multiply by weight. The gradient of weight is summed in fp32, in a
    fixed order.

    Args:
        x: `[..., D]`, float32, bfloat16, float16 or float64; a slice of a projection is read
            without a copy.
        weight: `[D]`, of any of these dtypes.
        eps: 0 or more.
        zero_centered: multiply by `1 + weight` instead, as Qwen3-Next, Qwen3.5 and Gemma do.

    Returns:
        `[..., D]` of x's dtype, contiguous. Differentiable once in x and weight.

    Raises:
        TypeError: x or weight is not a tensor or not of a floating dtype.
        ValueError: a shape, a device or eps is invalid.
        NotImplementedError: the backward itself is differentiated.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; `torch.nn.RMSNorm`;
    transformers `Qwen3NextRMSNorm` (zero_centered).
    """
    return op.forward(*_prepare(x, weight, eps, zero_centered=zero_centered))


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    zero_centered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `rms_norm(x + residual)` and the sum, in one pass.

    The sum is rounded to x's dtype before it is normalized, so both results have the same bits as
    an addition followed by `rms_norm`.

    Args:
        x: `[..., D]`, as for `rms_norm`.
        residual: x's shape and dtype.
        weight, eps, zero_centered: as for `rms_norm`.

    Returns:
        The norm, and the sum, which is the next layer's residual; `[..., D]` of x's dtype,
        contiguous. Differentiable once in x, residual and weight.

    Raises:
        TypeError: x, residual or weight is not a tensor or not of a floating dtype; or the dtypes
            of x and residual differ.
        ValueError: a shape, a device or eps is invalid.
        NotImplementedError: the backward itself is differentiated.

    Source: torch_npu's `npu_add_rms_norm`; vLLM's and SGLang's `RMSNorm` with a residual.
    """
    return op.add_forward(*_prepare_add(x, residual, weight, eps, zero_centered=zero_centered))


def _prepare(x, weight, eps=1e-6, *, zero_centered=False):
    """Check the arguments of `rms_norm`; return the operator's inputs."""
    check.rows(x, weight)
    check.epsilon("eps", eps)
    return x, weight, float(eps), bool(zero_centered)


def _prepare_add(x, residual, weight, eps=1e-6, *, zero_centered=False):
    """Check the arguments of `add_rms_norm`; return the operator's inputs."""
    x, *settings = _prepare(x, weight, eps, zero_centered=zero_centered)
    check.like_x("residual", residual, x)
    check.same_dtype("residual", residual, "x", x)
    return x, residual, *settings


explains("rms_norm", op.forward, _prepare)
explains("add_rms_norm", op.add_forward, _prepare_add)
