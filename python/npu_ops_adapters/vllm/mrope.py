"""Multimodal rotary embedding: positions `[3, T]` of time, height and width."""

from __future__ import annotations

from collections.abc import Iterable

import npu_ops
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.serving import check_device
from npu_ops_adapters.vllm import functions, rope


def patches() -> Iterable[Patch]:
    """`AscendMRotaryEmbedding.forward_oot`."""
    yield functions.replaced(
        f"{rope.HOME}:AscendMRotaryEmbedding.forward_oot",
        "mrope",
        ours,
        "it gathers and copies the rows of three axes first, or is not fused at all",
        ("self", "positions", "query", "key"),
    )


def ours(self, positions, query, key):
    """mrope_interleaved: which axis owns a frequency; is_neox_style: what rotates together."""
    check_device(query)
    if positions.dim() == 1:
        return rope.ours(
            positions, query, key, self.cos_sin_cache, self.head_size, self.rotary_dim,
            self.is_neox_style,
        )  # fmt: skip
    return npu_ops.apply_multimodal_rotary_pos_emb_cached(
        positions,
        query,
        key,
        self.cos_sin_cache,
        self.mrope_section,
        "interleaved" if self.mrope_interleaved else "chunked",
        rope.pair_layout(self.is_neox_style),
        self.rotary_dim,
        head_dim=self.head_size,
    )
