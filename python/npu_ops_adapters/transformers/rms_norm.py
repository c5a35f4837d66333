"""RMSNorm: before and after each layer, and of the heads of q and k."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

import npu_ops
from npu_ops.core import check
from npu_ops_adapters.calls import check_device
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.transformers import models

_CLASSES = {
    "qwen2": "Qwen2RMSNorm",
    "qwen2_vl": "Qwen2VLRMSNorm",  # version 4 has Qwen2's in these two
    "qwen2_5_vl": "Qwen2_5_VLRMSNorm",
    "qwen3": "Qwen3RMSNorm",
    "qwen3_moe": "Qwen3MoeRMSNorm",
    "qwen3_vl": "Qwen3VLTextRMSNorm",
    "qwen3_vl_moe": "Qwen3VLMoeTextRMSNorm",
}
# Their weight is what is added to 1.


def patches() -> Iterable[Patch]:
    """The method that normalises and multiplies."""
    for model, name in _CLASSES.items():
        if model not in models.QWEN2_VL or models.having((model,), name):
            yield from _patch(model, name, ours, ("self", "hidden_states"))
    for model, name in models.delta_net_classes("RMSNorm").items():
        yield from _patch(model, name, ours_zero_centered, ("self", "x"))


def _patch(model: str, name: str, function: Callable, signature) -> Iterable[Patch]:
    return models.replaced((model,), f"{name}.forward", "rms_norm", function, signature)


def ours(module, hidden_states) -> Callable:
    """Return the npu-ops call for this call of transformers; it rounds once, theirs twice."""
    x, weight = hidden_states, module.weight
    _check("hidden_states", x, weight)
    check.one_of("weight's dtype", weight.dtype, (x.dtype,))  # theirs is the wider of both
    return functools.partial(npu_ops.rms_norm, x, weight, module.variance_epsilon)


def ours_zero_centered(module, x) -> Callable:
    """The same where weight is what is added to 1."""
    _check("x", x, module.weight)
    return functools.partial(npu_ops.rms_norm, x, module.weight, module.eps, zero_centered=True)


def _check(name: str, x: torch.Tensor, weight: torch.Tensor) -> None:
    for of, tensor in ((name, x), ("weight", weight)):
        check.floating(of, tensor)
        check.one_of(f"{of}'s dtype", tensor.dtype, check.FLOATS[:3])
    check.same_device("weight", weight, name, x)
    check_device(x)
    if x.dim() == 0 or weight.shape != x.shape[-1:]:
        raise check.shape("weight", weight, f"{name}'s last dimension")
