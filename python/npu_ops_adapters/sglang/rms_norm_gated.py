"""Replaces the gated norm of Gated Delta Net, in SGLang's copy of fla."""

from __future__ import annotations

from collections.abc import Iterable

import npu_ops
from npu_ops_adapters.patching import Patch, parameters
from npu_ops_adapters.sglang import functions

_ACTIVATIONS = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}


def patches() -> Iterable[Patch]:
    """Patch the functions behind `FusedRMSNormGated` and `RMSNorm` in SGLang's copy of fla."""
    home = "sglang.kernels.ops" if functions.since("0.5.18") else "sglang.srt.layers"
    home += ".attention.fla"
    why = "on NPUs it is another package's function, elsewhere it needs a Triton driver"
    if functions.since("0.5.10"):
        yield functions.replaced(
            f"{home}.fused_norm_gate:rms_norm_gated", "rms_norm_gated", ours, why
        )
    names = parameters(ours_by_name)
    yield functions.replaced(
        f"{home}.layernorm_gated:rms_norm_gated",
        "rms_norm_gated",
        ours_by_name,
        why,
        names[:-1],
        names,
    )


def ours(
    x, g, weight, bias, activation="swish", residual=None, prenorm=False, residual_in_fp32=False,
    eps=1e-6,
):  # fmt: skip
    """Normalize x and multiply it by the activated gate g.

    residual_in_fp32 is ignored: it matters only with prenorm, which is not supported.
    """
    functions.check_device(x)
    functions.refuse(bias=bias, residual=residual, prenorm=prenorm)
    return npu_ops.rms_norm_gated(x, weight, g, eps, activation=_activation(activation))


def ours_by_name(
    *, x, weight, bias, z=None, eps=1e-6, group_size=None, norm_before_gate=True,
    is_rms_norm=False, activation="swish",
):  # fmt: skip
    """Normalize x and multiply it by the activated gate z.

    norm_before_gate tells which comes first. z may be `[T, H, D]` while x is `[T * H, D]`.
    """
    functions.check_device(x)
    functions.refuse(bias=bias, is_rms_norm=not is_rms_norm)
    if z is None:
        raise ValueError("z: got None, needs a gate")
    out = npu_ops.rms_norm_gated(
        x.reshape(z.shape),
        weight,
        z,
        eps,
        norm_before_gate=norm_before_gate,
        activation=_activation(activation),
        group_size=group_size,
    )
    return out.view(x.shape)


def _activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise ValueError(f"activation: got {name!r}, needs one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]
