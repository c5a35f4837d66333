"""The gated norm of Gated Delta Net: RMSNorm of what the delta rule computes, times a gate."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import npu_ops
from npu_ops.core import check
from npu_ops_adapters.calls import check_device
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.transformers import models


def patches() -> Iterable[Patch]:
    """The method that normalises, multiplies and rounds."""
    for model, name in models.delta_net_classes("RMSNormGated").items():
        yield from models.replaced(
            (model,), f"{name}.forward", "rms_norm_gated", ours, ("self", "hidden_states", "gate")
        )


def ours(module, hidden_states, gate=None) -> Callable:
    """Return the npu-ops call for this call of transformers; it rounds once, theirs twice.

    Version 4 has silu in the code, version 5 in an attribute.
    """
    x, weight = hidden_states, module.weight
    check.one_of("activation", getattr(module, "activation", "silu"), ("silu", "swish"))
    for name, tensor in (("hidden_states", x), ("gate", gate), ("weight", weight)):
        check.floating(name, tensor)
        check.one_of(f"{name}'s dtype", tensor.dtype, check.FLOATS[:3])
        check.same_device(name, tensor, "hidden_states", x)
    check_device(x)
    if x.dim() == 0 or weight.shape != x.shape[-1:] or gate.shape != x.shape:
        raise check.shape("gate", gate, f"hidden_states' {list(x.shape)}")
    return functools.partial(npu_ops.rms_norm_gated, x, weight, gate, module.variance_epsilon)
