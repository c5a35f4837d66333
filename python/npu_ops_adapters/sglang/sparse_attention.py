"""Replaces Qwen4-Exp's sparse attention: a query attends to keys that an indexer chooses for it.

SGLang has this attention for CUDA and ROCm. On other devices its indexer has no method to run. Its
attention loops over the queries, and expects a cache of another shape than caches on NPUs have. On
NPUs `Tensor.is_cuda` is True in SGLang (torch_npu's `transfer_to_npu`), so SGLang chooses kernels
for CUDA.

The indexer rotates its blocks of keys by tables that the embedding shares with the attention layers
(`position_cos`), and overwrites them. On NPUs a decoding step fills these tables only once, in the
first attention layer. So without a patch, later layers would rotate q and k by the positions of
blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

import npu_ops
from npu_ops.core import env, make
from npu_ops_adapters.calls import DEVICES
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
    why = "it computes queries one by one, and does not support the cache of an NPU"
    for name in ("forward_extend", "forward_decode"):
        yield functions.replaced(f"{_BACKEND}.{name}", "attention", attend, why, _CALL)
    if functions.on_npu():
        yield from _instead_of_cuda()
    if env.settings.consistent:
        why = "it sums products in another order than training, so another key may be chosen"
        for name, ours in (("prefill", score_prompts), ("decode", score_steps)):
            target = f"{_HOME}.qsa.mqa:torch_qsa_mqa_{name}"
            yield functions.replaced(target, "linear", ours, why)


def _instead_of_cuda() -> Iterable[Patch]:
    """Patch the functions that choose a kernel for CUDA on an NPU."""
    why = "it is a kernel for CUDA"
    topk = "sglang.kernels.ops.attention.fast_topk:fast_topk"
    yield functions.replaced(topk, "attention", largest, why)
    target = f"{_HOME}.qsa.qsa_indexer:qsa_fast_topk"
    yield functions.replaced(target, "attention", largest_of_spans, why)
    target = f"{_INDEXER}._use_fused_prep"
    yield functions.replaced(target, "attention", not_fused, why)


def not_fused(self, tensor):
    """Return False: the kernel that prepares q and k of the indexer is for CUDA."""
    functions.check_device(tensor)
    return False


def largest(score, lengths, topk, row_starts=None):
    """Return int32 `[T, topk]`: the indices of the largest elements in a range of each row.

    A row's range is `lengths` elements from `row_starts` on; indices count from its start. If a
    range has fewer than topk elements, -1 fills the rest.
    """
    functions.check_device(score)
    starts = torch.zeros_like(lengths) if row_starts is None else row_starts
    out = lengths.new_full((score.shape[0], topk), -1, dtype=torch.int32)
    if env.settings.consistent:
        # Among equal scores, topk chooses as in training only if it gets the range alone.
        for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
            found = score[row, start : start + length].topk(min(topk, length)).indices
            out[row, : found.shape[0]] = found.to(torch.int32)
        return out
    columns = make.counted(score.shape[1], device=score.device)
    hidden = (columns < starts[:, None]) | (columns >= (starts + lengths)[:, None])
    found = score.masked_fill(hidden, -torch.inf).topk(min(topk, score.shape[1]))
    out[:, : found.indices.shape[1]] = (found.indices - starts[:, None]).masked_fill(
        found.values == -torch.inf, -1
    )
    return out


def largest_of_spans(logits, row_starts, row_ends, topk):
    """Do the same as `largest`, for ranges given by their starts and ends."""
    return largest(logits, row_ends - row_starts, topk, row_starts)


def with_a_method(original: Callable) -> Callable:
    """Wrap `__init__` to select SGLang's portable code on devices for which it selects none."""

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if self.index_qk_proj.weight.device.type in DEVICES:
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


def score_prompts(q, k, row_starts, row_ends, score_scale=None):
    """Return the indexer's score of each query for each block of keys, fp32 `[T, keys]`.

    q: `[T, N, D]`. k: `[keys, 1, D]`, one key per block. Outside row_starts to row_ends a score is
    -inf.
    """
    functions.check_device(q)
    columns = make.counted(k.shape[0], device=q.device)
    hidden = (columns < row_starts[:, None]) | (columns >= row_ends[:, None])
    return _scores(q, k[:, 0], score_scale).masked_fill(hidden, -torch.inf)


def score_steps(q, k_cache, page_table, context_lens, max_model_len, score_scale=None):
    """Do the same as `score_prompts` for one query per sequence, whose keys are in a paged cache.

    Returns fp32 `[sequences, max_model_len]`.
    """
    functions.check_device(q)
    found = q.new_full((q.shape[0], max_model_len), -torch.inf, dtype=torch.float32)
    for row, (pages, length) in enumerate(zip(page_table, context_lens.tolist(), strict=True)):
        keys = k_cache[pages.long()].flatten(0, 2)[:length]
        found[row, :length] = _scores(q[row : row + 1], keys, score_scale)[0]
    return found


def _scores(q, keys, scale):
    """Return the sums over N of the positive products of `[T, N, D]` and `[keys, D]`, scaled.

    fp32 `[T, keys]`, computed as in transformers.
    """
    products = torch.matmul(q.float(), keys.float().t()).transpose(-1, -2)
    return torch.relu(products).sum(-1) / (scale or q.shape[-1] ** 0.5)


def attend(
    self, q, k, v, layer, forward_batch, save_kv_cache=True, topk_indices=None, **options
):  # fmt: skip
    """Write the new keys and values, attend to the chosen keys, and return `[T, heads * D]`."""
    functions.check_device(q)
    functions.refuse(attn_cp_metadata=getattr(forward_batch, "attn_cp_metadata", None), **options)
    if topk_indices is None:
        raise ValueError("topk_indices: got None, needs the keys of each query")
    metadata = self._resolve_metadata(forward_batch)
    functions.refuse(is_cuda_graph=metadata.is_cuda_graph)  # a graph's table of slots is empty
    if save_kv_cache:
        self.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
    chosen = self._expand_block_indices(topk_indices, metadata)
    queries = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
    pool, heads = self.token_to_kv_pool, (-1, layer.tp_k_head_num, layer.head_dim)
    keys, values = (
        cache(layer.layer_id).reshape(heads)
        for cache in (pool.get_key_buffer, pool.get_value_buffer)
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
    """Attend with the queries of each sequence to all of its keys, with a mask of the chosen ones.

    Training uses this mask, too, so with NPU_OPS_CONSISTENT both get the same bits.
    """
    lengths = metadata.sequence_lengths.tolist()
    counts = metadata.token_to_batch_idx.bincount(minlength=len(lengths)).tolist()
    parts = (q.split(counts), chosen.split(counts), metadata.token_slot_table, lengths)
    found = []
    for queries, own, slots, length in zip(*parts, strict=True):
        k, v = (cache[slots[:length].long()][None] for cache in (keys, values))
        mask = seen(own, length)
        found.append(npu_ops.attention(queries[None], k, v, attn_mask=mask, scale=scale)[0])
    return torch.cat(found)


def seen(chosen, length: int) -> torch.Tensor:
    """Return a mask of the chosen keys, bool `[queries, length]`. Index -1 chooses no key."""
    mask = torch.zeros(chosen.shape[0], length + 1, dtype=torch.bool, device=chosen.device)
    columns = torch.where(chosen < 0, length, chosen).long()
    return mask.scatter_(1, columns, True)[:, :length]


def _slots(table, chosen) -> torch.Tensor:
    """Return the cache slots of chosen positions; slot 0 for position -1."""
    slots = table.gather(1, chosen.clamp(min=0).long())
    return slots.masked_fill(chosen < 0, 0).long()
