"""Replaces the three functions that Megatron's `get_bias_dropout_add` looks up at each call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable

import torch

import npu_ops
from npu_ops.core import check
from npu_ops_adapters.patching import Patch

_MODULE = "megatron.core.fusions.fused_bias_dropout"


def patches() -> Iterable[Patch]:
    """Patch `bias_dropout_add_unfused`, `_fused_train` and `_fused_inference`."""
    call = ("x_with_bias", "residual", "prob")
    makes = {
        "bias_dropout_add_fused_train": (functools.partial(_replace, training=True), call),
        "bias_dropout_add_fused_inference": (functools.partial(_replace, training=False), call),
        "bias_dropout_add_unfused": (_replace_factory, ("training",)),
    }
    for name, (make, signature) in makes.items():
        yield Patch(
            target=f"{_MODULE}:{name}",
            op="bias_dropout_add",
            make=make,
            why="unfused it launches four kernels and stores a mask, fused it needs torch.compile",
            signatures=(signature,),
            versions="Megatron-Core 0.12 to 0.19",
            remove_when="Megatron-Core calls an operator here that has an NPU kernel",
        )


@dataclasses.dataclass(frozen=True)
class _Rules:
    """Behaviour that differs between versions but not in the signature.

    casts_to_residual: x and bias are cast to the residual's dtype (from 0.17 on); otherwise the
    residual is cast.
    in_place: evaluation without gradients writes into x (from 0.13 on).
    """

    casts_to_residual: bool
    in_place: bool


def _rules(function: Callable) -> _Rules:
    """Find the rules by calling the function: a fork may have backported a later change."""
    mixed = function((_tiny(torch.bfloat16), None), _tiny(torch.float32), 0.0)
    x = _tiny(torch.float32)
    same = function((x, None), _tiny(torch.float32), 0.0)
    return _Rules(mixed.dtype == torch.float32, same.data_ptr() == x.data_ptr())


def _tiny(dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(1, dtype=dtype, device="cpu")


def _replace_factory(original: Callable) -> Callable:
    train, evaluate = (_replace(original(training), training) for training in (True, False))

    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_unfused(training):
        return train if training else evaluate

    return npu_ops_unfused


def _replace(original: Callable, training: bool) -> Callable:
    # If jit_fuser is not patched, the original is compiled. Then test the function that was
    # compiled.
    rules = _rules(getattr(original, "_torchdynamo_orig_callable", original))

    # The replacement must be a plain function: Megatron's build_module accepts nothing else.
    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_bias_dropout_add(x_with_bias, residual, prob):
        x, bias = x_with_bias
        if not _is_ours(x, bias, residual, prob):
            return original(x_with_bias, residual, prob)
        casts = rules.casts_to_residual and x.dtype != residual.dtype
        in_place = rules.in_place and not casts and not _any_requires_grad(x, bias, residual)
        if in_place and not x.is_contiguous():
            return original(x_with_bias, residual, prob)
        dtype = _result_dtype(x, bias, residual, casts, in_place)
        return npu_ops.bias_dropout_add(
            x, bias, residual, prob, training, dtype=dtype, inplace=in_place
        )

    return npu_ops_bias_dropout_add


def _is_ours(x, bias, residual, prob) -> bool:
    return (
        isinstance(prob, (int, float))
        and 0 <= prob < 1
        and _fits(x, x)
        and x.dim() > 0
        and _fits(residual, x)
        and residual.shape == x.shape
        and (bias is None or (_fits(bias, x) and bias.shape in (x.shape, x.shape[-1:])))
    )


def _fits(tensor, x) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype in check.FLOATS
        and tensor.device == x.device
    )


def _any_requires_grad(*tensors) -> bool:
    """Return whether a tensor requires a gradient. Like Megatron, ignore torch.no_grad()."""
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _result_dtype(x, bias, residual, casts: bool, in_place: bool) -> torch.dtype:
    if casts:
        return residual.dtype
    if in_place or bias is None:
        return x.dtype
    return torch.promote_types(x.dtype, bias.dtype)
