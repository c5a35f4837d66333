"""Replaces `RotaryEmbedding` on an NPU, and on a CPU without SGLang's own kernels."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from npu_ops_adapters.patching import Patch
from npu_ops_adapters.serving_rotary import rotate_by_embedding
from npu_ops_adapters.sglang import functions

_PARAMETERS = ("self", "positions", "query", "key", "offsets", "fused_set_kv_buffer_arg")


def patches() -> Iterable[Patch]:
    """Patch `forward_npu` and `forward_native`, of which each embedding uses one."""
    home = functions.rotary_embedding("base")
    yield functions.replaced(
        f"{home}:RotaryEmbedding.forward_npu",
        "rope",
        ours,
        "torch_npu's operator takes no fp32 table with bf16 heads and no third dimension",
        _PARAMETERS,
    )
    yield functions.replaced(
        f"{home}:RotaryEmbedding.forward_native",
        "rope",
        ours_on_cpu,
        "it launches a dozen kernels, and each rounds to the heads' dtype",
        _PARAMETERS,
    )


def ours(self, positions, query, key, offsets=None, fused_set_kv_buffer_arg=None):
    """Rotate heads `[T, N * D]` or `[T, N, D]`. A row of the table has cosines, then sines."""
    check_plain(self, query, "RotaryEmbedding")
    functions.refuse(fused_set_kv_buffer_arg=fused_set_kv_buffer_arg)
    positions = (positions if offsets is None else positions + offsets).flatten()
    rows = (x.reshape(positions.shape[0], -1) for x in (query, key))
    q, k = rotate_by_embedding(self, positions, *rows)
    return q.view(query.shape), k.view(key.shape)


def ours_on_cpu(self, positions, query, *args, **kwargs):
    """Rotate on CPUs only. On other devices SGLang uses this method as a reference."""
    functions.check_device(query, ("cpu",))
    return ours(self, positions, query, *args, **kwargs)


def check_plain(embedding, query, home: str) -> None:
    """Raise NotOursError unless npu-ops computes what this embedding does.

    The class that defines its rotation must be called `home`. No setting may force SGLang's method,
    and the call must not be inside torch.compile.
    """
    functions.check_device(query)
    if torch.compiler.is_compiling():
        raise functions.NotOursError("SGLang chooses the functions that torch.compile traces")
    definer = next(c for c in type(embedding).__mro__ if "forward_native" in vars(c))
    if definer.__name__ != home:
        raise functions.NotOursError(f"{definer.__name__} rotates in its own way")
    if getattr(embedding, "_force_native", False) or hasattr(embedding, "sin_cos_cache"):
        raise functions.NotOursError("SGLang needs its own arithmetic here, bit for bit")
