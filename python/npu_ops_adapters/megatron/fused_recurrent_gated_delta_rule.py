"""Adds the delta rule token by token to Megatron's layers if fla is missing."""

from __future__ import annotations

from collections.abc import Iterable

from npu_ops_adapters.fla.fused_recurrent_gated_delta_rule import ours
from npu_ops_adapters.megatron import gated_delta_net
from npu_ops_adapters.patching import Patch


def patches() -> Iterable[Patch]:
    """Patch `fused_recurrent_gated_delta_rule`, which `GatedDeltaNet.ssm_decode` calls."""
    name = "fused_recurrent_gated_delta_rule"
    yield from gated_delta_net.for_decoding(name, name, ours)
