"""Replaces multimodal rotary embedding: positions `[3, T]` of time, height and width."""

from __future__ import annotations

from collections.abc import Iterable

from npu_ops_adapters.patching import Patch
from npu_ops_adapters.serving_rotary import rotate_by_embedding
from npu_ops_adapters.sglang import functions, rope

_PARAMETERS = ("self", "positions", "query", "key", "fused_set_kv_buffer_arg")


def patches() -> Iterable[Patch]:
    """Patch `forward_npu` and `forward_native` of `MRotaryEmbedding`."""
    home = functions.rotary_embedding("mrope")
    yield functions.replaced(
        f"{home}:MRotaryEmbedding.forward_npu",
        "mrope",
        ours,
        "up to 0.5.20 it rotates every axis by the first axis' angle, later it is not fused",
        _PARAMETERS,
    )
    yield functions.replaced(
        f"{home}:MRotaryEmbedding.forward_native",
        "mrope",
        ours_on_cpu,
        "it launches two dozen kernels, and each rounds to the heads' dtype",
        _PARAMETERS,
    )


def ours(self, positions, query, key, fused_set_kv_buffer_arg=None):
    rope.check_plain(self, query, "MRotaryEmbedding")
    functions.refuse(
        fused_set_kv_buffer_arg=fused_set_kv_buffer_arg,
        mrope_interleaved_glm=getattr(self, "mrope_interleaved_glm", False),
    )
    return rotate_by_embedding(self, positions, query, key)


def ours_on_cpu(self, positions, query, *args, **kwargs):
    """Rotate on CPUs only, see `rope.ours_on_cpu`."""
    functions.check_device(query, ("cpu",))
    return ours(self, positions, query, *args, **kwargs)
