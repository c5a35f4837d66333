"""Replaces rope in MindSpeed-Bridge's Qwen3.5, a copy of Megatron-Bridge 0.4's function."""

from __future__ import annotations

from collections.abc import Iterable

from npu_ops_adapters.megatron import qwen3_vl
from npu_ops_adapters.patching import Patch

_ROPE = "mindspeed_bridge.models.qwen_vl.modelling_qwen3_vl.rope"


def patches() -> Iterable[Patch]:
    """Patch `apply_rotary_pos_emb_absolute`, which the model's attention imports by value."""
    yield qwen3_vl.absolute(_ROPE, "MindSpeed-Bridge of May 2026, on core_r0.16")
