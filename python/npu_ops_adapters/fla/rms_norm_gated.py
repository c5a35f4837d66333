"""Replaces fla's two gated RMSNorms, which apply the gate after the norm or before it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import npu_ops
from npu_ops.core import check
from npu_ops_adapters.calls import check_device
from npu_ops_adapters.fla import functions
from npu_ops_adapters.patching import Patch

_ACTIVATIONS = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}


def patches() -> Iterable[Patch]:
    """Patch `rms_norm_gated` of `FusedRMSNormGated`, and `rmsnorm_fn` of `RMSNormGated`."""
    yield functions.replaced(
        ("fla.modules.norm.fused_norm_gate", "fla.modules.fused_norm_gate"), "rms_norm_gated", ours
    )
    yield functions.replaced(
        ("fla.modules.norm.layernorm_gated", "fla.modules.layernorm_gated"),
        "rmsnorm_fn",
        ours_either_order,
        op="rms_norm_gated",
    )


def ours(
    x, g, weight, bias, activation="swish", residual=None, prenorm=False, residual_in_fp32=False,
    eps=1e-6,
) -> Callable:  # fmt: skip
    """Return the npu-ops call for this call of fla.

    residual_in_fp32 is ignored: it matters only with prenorm, which is not supported.
    """
    functions.refuse(bias=bias, residual=residual, prenorm=prenorm)
    _check(x, weight, g)
    check.one_of("activation", activation, tuple(_ACTIVATIONS))
    activation = _ACTIVATIONS[activation]
    return functools.partial(npu_ops.rms_norm_gated, x, weight, g, eps, activation=activation)


def ours_either_order(
    x, weight, bias, z=None, eps=1e-6, group_size=None, norm_before_gate=True
) -> Callable:
    """Return the npu-ops call for this call of fla."""
    functions.refuse(bias=bias)
    _check(x, weight, z)
    if group_size is not None and x.shape[-1] % group_size:
        raise ValueError(f"group_size: got {group_size}, needs a divisor of {x.shape[-1]}")
    return functools.partial(
        npu_ops.rms_norm_gated, x, weight, z, eps, norm_before_gate=norm_before_gate,
        group_size=group_size,
    )  # fmt: skip


def _check(x, weight, z) -> None:
    for name, tensor in (("x", x), ("weight", weight), ("z", z)):
        check.floating(name, tensor)
        check.same_device(name, tensor, "x", x)
    check_device(x)
    if x.dim() == 0 or weight.shape != x.shape[-1:]:
        raise check.shape("weight", weight, "x's last dimension")
    if z.shape != x.shape:
        raise check.shape("z", z, f"x's shape {list(x.shape)}")
