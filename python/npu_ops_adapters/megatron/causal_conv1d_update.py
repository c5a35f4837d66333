"""Adds the short convolution's decoding step to Megatron's layers if fla is missing."""

from __future__ import annotations

from collections.abc import Iterable

from npu_ops_adapters.fla.causal_conv1d_update import ours
from npu_ops_adapters.megatron import gated_delta_net
from npu_ops_adapters.patching import Patch


def patches() -> Iterable[Patch]:
    """Patch `causal_conv1d_update`, which `GatedDeltaNet.ssm_decode` calls."""
    name = "causal_conv1d_update"
    yield from gated_delta_net.for_decoding(name, name, ours)
