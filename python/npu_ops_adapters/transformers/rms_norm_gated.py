"""Replaces linear attention's gated norm: RMSNorm of the delta rule's output, times a gate."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import npu_ops
from npu_ops.core import check
from npu_ops_adapters.calls import check_device
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.transformers import models
from npu_ops_adapters.transformers.equivalence import Draw, Variant, small_norm

_NAMES = ("self", "hidden_states", "gate")
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}


def patches() -> Iterable[Patch]:
    """Patch `forward` of each model's gated norm."""
    variant = Variant(ours, _calls, small_norm, reads=("activation",))
    yield from models.compared_classes(
        models.linear(), "RMSNormGated", "rms_norm_gated", (variant,), _NAMES
    )


def _calls(cls: type) -> list[tuple]:
    """Return small calls, one for each activation if the module has that setting."""
    module, draw = small_norm(cls, 1), Draw()
    x, gate = draw.normal(5, 8), draw.normal(5, 8)
    half = (small_norm(cls, 1).bfloat16(), x.bfloat16(), gate.bfloat16())
    if not hasattr(module, "activation"):
        return [(module, x, gate), half]
    by_activation = [(small_norm(cls, 1), x, gate) for _ in _ACTIVATIONS]
    for (other, *_), name in zip(by_activation, _ACTIVATIONS, strict=True):
        other.activation = name
    return [(module, x, gate), half, *by_activation]


def ours(module, hidden_states, gate=None) -> Callable:
    """Return the npu-ops call for this call of transformers.

    npu-ops rounds the result once, transformers twice. transformers 4 always uses silu; version 5
    has an attribute for the activation.
    """
    x, weight = hidden_states, module.weight
    activation = getattr(module, "activation", "silu")
    check.one_of("activation", activation, tuple(_ACTIVATIONS))
    for name, tensor in (("hidden_states", x), ("gate", gate), ("weight", weight)):
        check.floating(name, tensor)
        check.one_of(f"{name}'s dtype", tensor.dtype, check.KERNEL_DTYPES)
        check.same_device(name, tensor, "hidden_states", x)
    check_device(x)
    if x.dim() == 0 or weight.shape != x.shape[-1:] or gate.shape != x.shape:
        raise check.shape("gate", gate, f"hidden_states' {list(x.shape)}")
    return functools.partial(
        npu_ops.rms_norm_gated, x, weight, gate, module.variance_epsilon,
        activation=_ACTIVATIONS[activation],
    )  # fmt: skip
