"""The gated norm after Gated Delta Net."""

from __future__ import annotations

from collections.abc import Iterable

import npu_ops
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.serving import check_device, refuse
from npu_ops_adapters.vllm import functions

_ACTIVATIONS = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}


def patches() -> Iterable[Patch]:
    """Patch `AscendRMSNormGated.forward_oot`, which is vLLM's RMSNormGated on NPUs."""
    yield functions.replaced(
        "vllm_ascend.ops.layernorm:AscendRMSNormGated.forward_oot",
        "rms_norm_gated",
        ours,
        "it keeps a mean and a deviation that nobody reads, and takes contiguous rows alone",
    )


def ours(self, x, z=None):
    """Compute the gated norm. z: the gate, in x's shape. vllm-ascend 0.18.0 has SiLU only."""
    check_device(x)
    refuse(bias=self.bias)
    if z is None:
        raise ValueError("z: got None, needs a gate")
    activation = getattr(self, "activation", "swish")
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation: got {activation!r}, needs {' or '.join(_ACTIVATIONS)}")
    return npu_ops.rms_norm_gated(
        x,
        self.weight,
        z,
        self.eps,
        norm_before_gate=self.norm_before_gate,
        activation=_ACTIVATIONS[activation],
        group_size=self.group_size,
    )
