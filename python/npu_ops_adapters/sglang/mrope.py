"""Multimodal rotary embedding: positions `[3, T]` of time, height and width."""

from __future__ import annotations

from collections.abc import Iterable

import npu_ops
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.sglang import functions, rope

_PARAMETERS = ("self", "positions", "query", "key", "fused_set_kv_buffer_arg")


def patches() -> Iterable[Patch]:
    """As for `rope`; before 0.5.23 the NPU's gave images the angles of text."""
    home = functions.rotary_embedding("mrope")
    yield functions.replaced(
        f"{home}:MRotaryEmbedding.forward_npu",
        "mrope",
        ours,
        "up to 0.5.20 it rotates every axis by the first one's angle, and later it is not fused",
        _PARAMETERS,
    )
    yield functions.replaced(
        f"{home}:MRotaryEmbedding.forward_native",
        "mrope",
        ours_on_cpu,
        "two dozen kernels, each rounding to the heads' dtype",
        _PARAMETERS,
    )


def ours(self, positions, query, key, fused_set_kv_buffer_arg=None):
    """mrope_interleaved: which axis owns a frequency; is_neox_style: what rotates together."""
    rope.check_plain(self, query, "MRotaryEmbedding")
    functions.refuse(
        fused_set_kv_buffer_arg=fused_set_kv_buffer_arg,
        mrope_interleaved_glm=getattr(self, "mrope_interleaved_glm", False),
    )
    if positions.dim() == 1:
        return rope.rotate(self, positions, query, key)
    return npu_ops.apply_multimodal_rotary_pos_emb_cached(
        positions,
        query,
        key,
        self.cos_sin_cache,
        self.mrope_section,
        "interleaved" if self.mrope_interleaved else "chunked",
        rope.pair_layout(self),
        self.rotary_dim,
        head_dim=self.head_size,
    )


def ours_on_cpu(self, positions, query, *args, **kwargs):
    """As in `rope`."""
    functions.check_device(query, ("cpu",))
    return ours(self, positions, query, *args, **kwargs)
