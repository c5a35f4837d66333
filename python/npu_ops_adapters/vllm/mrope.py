"""Multimodal rotary embedding: positions `[3, T]` of time, height and width."""

from __future__ import annotations

from collections.abc import Iterable

from npu_ops_adapters.patching import Patch
from npu_ops_adapters.serving import check_device
from npu_ops_adapters.serving_rotary import rotate_by_embedding
from npu_ops_adapters.vllm import functions, rope


def patches() -> Iterable[Patch]:
    """Replace vllm-ascend's `AscendMRotaryEmbedding.forward_oot`."""
    yield functions.replaced(
        f"{rope.HOME}:AscendMRotaryEmbedding.forward_oot",
        "mrope",
        ours,
        "it gathers and copies the rows of three axes first, or is not fused at all",
    )


def ours(self, positions, query, key):
    """Rotate query and key `[T, N * D]`; positions are `[3, T]`, or `[T]` for text alone."""
    check_device(query)
    return rotate_by_embedding(self, positions, query, key)
