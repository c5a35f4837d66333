"""Rotary embedding of text: replaces vllm-ascend's operator `npu_rotary_embedding`."""

from __future__ import annotations

from collections.abc import Iterable

from npu_ops_adapters.patching import Patch
from npu_ops_adapters.serving import check_device, refuse
from npu_ops_adapters.serving_rotary import rotate
from npu_ops_adapters.vllm import functions

HOME = "vllm_ascend.ops.rotary_embedding"


def patches() -> Iterable[Patch]:
    """Patch `rope_forward_oot`, before vllm-ascend registers it as an operator."""
    yield functions.replaced(
        f"{HOME}:rope_forward_oot",
        "rope",
        ours,
        "it rotates in the heads' dtype, copies heads that are slices, and pads their number",
    )


def ours(
    positions, query, key, cos_sin_cache, head_size, rotary_dim, is_neox_style, offsets=None
):  # fmt: skip
    """Rotate heads `[T, N * D]`; a row of the cache has cosines, then sines."""
    check_device(query)
    refuse(offsets=offsets)
    return rotate(positions, query, key, cos_sin_cache, head_size, rotary_dim, is_neox_style)
