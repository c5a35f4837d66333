"""Qwen4-Exp's sparse attention: a query attends to the keys that an indexer chooses for it.

SGLang has this attention for CUDA and ROCm. On other devices its indexer has no method to run, and
its attention goes through the queries one by one, by a cache of another shape than on NPUs.

The indexer rotates its blocks of keys by tables that the embedding shares with the attention layers
(`position_cos`). On NPUs a decoding step fills them once, in the first attention layer, so the
layers after it rotated q and k by the positions of the first layer's blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

import npu_ops
from npu_ops.core import env
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.serving_rotary import pair_layout
from npu_ops_adapters.sglang import functions, rope

_HOME = "sglang.srt.layers.attention"
_INDEXER = f"{_HOME}.qsa.qsa_indexer:QSAIndexer"
_BACKEND = f"{_HOME}.qwen_sparse_attn_backend:QwenSparseAttnBackend"
_BUILT = ("self", "config", "layer_id", "quant_config", "prefix", "rotary_emb")
_CALL = ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "topk_indices", "kwargs")


def patches() -> Iterable[Patch]:
    """Patch the indexer and the backend of sparse attention."""
    if not functions.since("0.5.23"):
        return
    yield Patch(
        target=f"{_INDEXER}.__init__", op="attention", make=with_a_method,
        why="it has no method for NPUs and CPUs", signatures=(_BUILT,),
        versions="SGLang 0.5.23", remove_when="SGLang's indexer has a method for NPUs",
        by=functions.hooks.who_applies(),
    )  # fmt: skip
    yield functions.replaced(
        f"{_INDEXER}.apply_rope", "rope", rotated, "it overwrites tables that other layers read"
    )
    why = "it goes through queries one by one, and knows no cache of an NPU"
    for name in ("forward_extend", "forward_decode"):
        yield functions.replaced(f"{_BACKEND}.{name}", "attention", attend, why, _CALL)


def with_a_method(original: Callable) -> Callable:
    """Wrap `__init__` to select SGLang's portable code on devices for which it selects none."""

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if self.index_qk_proj.weight.device.type in functions.DEVICES:
            self._forward_method = self._forward_impl

    return __init__


def rotated(self, positions, tensor, ensure_cos_sin_cache=True):
    """Rotate heads `[T, N, D]` by positions `[T]` or `[3, T]`."""
    embedding = self.rotary_emb
    of_axes = getattr(embedding, "mrope_section", None)
    rope.check_plain(embedding, tensor, "MRotaryEmbedding" if of_axes else "RotaryEmbedding")
    functions.refuse(mrope_interleaved_glm=getattr(embedding, "mrope_interleaved_glm", False))
    if not tensor.numel():
        return tensor
    layout = pair_layout(embedding.is_neox_style)
    if positions.dim() == 2:
        sections = "interleaved" if embedding.mrope_interleaved else "chunked"
        out, _ = npu_ops.apply_multimodal_rotary_pos_emb_cached(
            positions, tensor, None, embedding.cos_sin_cache, embedding.mrope_section, sections,
            layout, embedding.rotary_dim,
        )  # fmt: skip
        return out
    cos, sin = embedding.cos_sin_cache.chunk(2, dim=-1)
    out, _ = npu_ops.apply_rotary_pos_emb(
        tensor, None, cos, sin, positions, layout="TND", pair_layout=layout,
        rotary_dim=embedding.rotary_dim,
    )  # fmt: skip
    return out


def attend(
    self, q, k, v, layer, forward_batch, save_kv_cache=True, topk_indices=None, **options
):  # fmt: skip
    """Write the new keys and values, then attend to the chosen keys: `[T, heads * D]`."""
    functions.check_device(q)
    functions.refuse(attn_cp_metadata=getattr(forward_batch, "attn_cp_metadata", None), **options)
    if topk_indices is None:
        raise ValueError("topk_indices: got None, needs the keys of each query")
    metadata = self._resolve_metadata(forward_batch)
    if save_kv_cache:
        self.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
    chosen = self._expand_block_indices(topk_indices, metadata)
    queries = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
    pool, heads = self.token_to_kv_pool, (-1, layer.tp_k_head_num, layer.head_dim)
    keys, values = (
        cache(layer.layer_id).reshape(heads) for cache in (pool.get_key_buffer, pool.get_value_buffer)
    )
    one_each = forward_batch.forward_mode.is_decode() and not env.settings.consistent
    way = attend_alone if one_each else attend_masked
    out = way(queries[: chosen.shape[0]], keys, values, chosen, metadata, layer.scaling)
    return functions.padded(out.flatten(1), queries.shape[0])


def attend_alone(q, keys, values, chosen, metadata, scale):
    """Attend with one query per sequence to a copy of its chosen keys."""
    slots = _slots(metadata.token_slot_table, chosen)
    out = npu_ops.attention(
        q[:, None], keys[slots], values[slots], seqlens_k=(chosen >= 0).sum(1), scale=scale
    )
    return out[:, 0]


def attend_masked(q, keys, values, chosen, metadata, scale):
    """Attend with the queries of each sequence to its keys up to now, by a mask.

    Training has this mask, too: with NPU_OPS_CONSISTENT both get the same bits.
    """
    found, counts = [], metadata.token_to_batch_idx.bincount(
        minlength=len(metadata.sequence_lengths)
    ).tolist()
    parts = zip(q.split(counts), chosen.split(counts), metadata.token_slot_table, strict=True)
    for (queries, own, slots), length in zip(
        parts, metadata.sequence_lengths.tolist(), strict=True
    ):
        k, v = (cache[slots[:length].long()][None] for cache in (keys, values))
        mask = seen(own, length)
        found.append(npu_ops.attention(queries[None], k, v, attn_mask=mask, scale=scale)[0])
    return torch.cat(found)


def seen(chosen, length: int) -> torch.Tensor:
    """Return bool `[queries, length]`: which keys are chosen. Index -1 is none."""
    mask = torch.zeros(chosen.shape[0], length + 1, dtype=torch.bool, device=chosen.device)
    columns = torch.where(chosen < 0, length, chosen).long()
    return mask.scatter_(1, columns, True)[:, :length]


def _slots(table, chosen) -> torch.Tensor:
    """Return the cache slots of chosen positions; of none, slot 0."""
    slots = table.gather(1, chosen.clamp(min=0).long())
    return slots.masked_fill(chosen < 0, 0).long()
