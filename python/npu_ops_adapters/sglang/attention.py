"""Replaces attention over the KV cache in SGLang's backend `torch_native`."""

from __future__ import annotations

from collections.abc import Iterable

import torch

import npu_ops
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.sglang import functions

_MODULE = "sglang.srt.layers.attention.torch_native_backend"
_CACHE = ("self", "query", "output", "k_cache", "v_cache", "req_to_token", "req_pool_indices")
_RULE = ("scaling", "enable_gqa", "causal")


def patches() -> Iterable[Patch]:
    """Patch the functions that compute prefill and decode after the cache is written."""
    for name, lengths, ours in (
        ("extend", ("seq_lens", "extend_prefix_lens", "extend_seq_lens"), extend),
        ("decode", ("seq_lens",), decode),
    ):
        yield functions.replaced(
            f"{_MODULE}:TorchNativeAttnBackend._run_sdpa_forward_{name}",
            "attention",
            ours,
            "it computes sequences one by one, and computes queries of a cached prefix again",
            (*_CACHE, *lengths, *_RULE),
            (*_CACHE, *lengths, "encoder_lens", *_RULE, "is_cross_attn", "sliding_window_size"),
        )


def extend(
    self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens,
    extend_prefix_lens, extend_seq_lens, encoder_lens=None, scaling=None, enable_gqa=False,
    causal=False, is_cross_attn=False, sliding_window_size=None,
):  # fmt: skip
    """Attend with new tokens `[T, heads, D]` of each sequence, after those already in the cache."""
    functions.check_device(query)
    functions.refuse(encoder_lens=encoder_lens, is_cross_attn=is_cross_attn)
    starts = torch.nn.functional.pad(extend_seq_lens.cumsum(0), (1, 0)).to(torch.int32)
    return _attend(
        query, output, k_cache, v_cache, req_to_token[req_pool_indices], seq_lens, starts,
        scaling, is_causal=causal, window=sliding_window_size,
    )  # fmt: skip


def decode(
    self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens,
    encoder_lens=None, scaling=None, enable_gqa=False, causal=False, is_cross_attn=False,
    sliding_window_size=None,
):  # fmt: skip
    """Attend with the last token of each sequence: no key needs to be masked."""
    functions.check_device(query)
    functions.refuse(encoder_lens=encoder_lens, is_cross_attn=is_cross_attn)
    starts = torch.arange(query.shape[0] + 1, dtype=torch.int32, device=query.device)
    return _attend(
        query, output, k_cache, v_cache, req_to_token[req_pool_indices], seq_lens, starts,
        scaling, is_causal=False, window=sliding_window_size,
    )  # fmt: skip


def _attend(query, output, k_cache, v_cache, slots, seq_lens, starts, scaling, is_causal, window):
    """Attend over SGLang's cache. It has a slot per token, so it is a paged cache of block_size 1.

    slots: `[N, tokens]`, the slots of each sequence's tokens.
    """
    lengths = seq_lens.tolist()
    result = npu_ops.attention(
        query,
        k_cache[:, None],
        v_cache[:, None],
        layout="TND",
        is_causal=is_causal,
        window=(window, 0) if window is not None and window >= 0 else None,
        cu_seqlens_q=starts,
        seqlens_k=seq_lens,
        block_table=slots[:, : max(lengths)].to(torch.int32),
        scale=scaling,
        cu_seqlens_cpu=starts.tolist(),
        seqlens_k_cpu=lengths,
    )
    output.copy_(result)
    return output
