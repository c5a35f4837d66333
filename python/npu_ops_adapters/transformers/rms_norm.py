"""Replaces RMSNorm of hidden states, and of the heads of q and k."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

import npu_ops
from npu_ops.core import check
from npu_ops_adapters.calls import check_device
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.transformers import models
from npu_ops_adapters.transformers.equivalence import Draw, Variant, small_norm

_CLASSES = {
    "qwen2": "Qwen2RMSNorm",
    "qwen2_vl": "Qwen2VLRMSNorm",  # version 4 uses Qwen2RMSNorm in this model and the next
    "qwen2_5_vl": "Qwen2_5_VLRMSNorm",
    "qwen3": "Qwen3RMSNorm",
    "qwen3_moe": "Qwen3MoeRMSNorm",
    "qwen3_vl": "Qwen3VLTextRMSNorm",
    "qwen3_vl_moe": "Qwen3VLMoeTextRMSNorm",
}
_SIGNATURES = ("self", "hidden_states"), ("self", "x")


def patches() -> Iterable[Patch]:
    """Patch `forward` of each model's RMSNorm classes."""
    for model, name in _CLASSES.items():
        if model not in models.QWEN2_VL or models.having((model,), name):
            yield from models.replaced(
                (model,), f"{name}.forward", "rms_norm", ours, _SIGNATURES[0]
            )
    variants = tuple(
        Variant(function, _calls, small_norm, reads=("group_size",))
        for function in (ours, ours_zero_centered)
    )
    yield from models.compared_classes(
        models.linear(), "RMSNorm", "rms_norm", variants, *_SIGNATURES
    )


def _calls(cls: type) -> list[tuple]:
    """Return small calls on whole rows, and on groups if a module has a group size."""
    x, module = Draw().normal(2, 3, 8), small_norm(cls, 1)
    calls = [(module, x), (small_norm(cls, 1).bfloat16(), x.bfloat16())]
    if getattr(module, "group_size", x) is None:
        grouped = small_norm(cls, 1)
        grouped.group_size = 4
        calls.append((grouped, x))
    return calls


def ours(module, hidden_states) -> Callable:
    """Return the npu-ops call for this call of transformers.

    npu-ops rounds the result once, transformers twice.
    """
    x, weight = hidden_states, module.weight
    _check("hidden_states", x, weight)
    # With two dtypes transformers returns the wider one, npu-ops that of x.
    check.one_of("weight's dtype", weight.dtype, (x.dtype,))
    return functools.partial(_normalise, module, x, zero_centered=False)


def ours_zero_centered(module, x) -> Callable:
    """Return the npu-ops call of a norm that multiplies by 1 + weight."""
    _check("x", x, module.weight)
    return functools.partial(_normalise, module, x, zero_centered=True)


def _normalise(module, x, zero_centered: bool):
    """Normalize rows of x, or groups of group_size elements if the module has that setting."""
    eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
    norm = functools.partial(npu_ops.rms_norm, eps=eps, zero_centered=zero_centered)
    size = getattr(module, "group_size", None)
    if size is None:
        return norm(x, module.weight)
    return torch.cat(list(map(norm, x.split(size, -1), module.weight.split(size))), -1)


def _check(name: str, x: torch.Tensor, weight: torch.Tensor) -> None:
    for of, tensor in ((name, x), ("weight", weight)):
        check.floating(of, tensor)
        check.one_of(f"{of}'s dtype", tensor.dtype, check.KERNEL_DTYPES)
    check.same_device("weight", weight, name, x)
    check_device(x)
    if x.dim() == 0 or weight.shape != x.shape[-1:]:
        raise check.shape("weight", weight, f"{name}'s last dimension")
