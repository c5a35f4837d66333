"""With NPU_OPS_CONSISTENT, attention over the paged cache has the bits of training.

vllm-ascend calls the vendor's operators, which sum in another order. In the default mode they stay,
because they are faster.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

import npu_ops
from npu_ops.core import check, env
from npu_ops.core.hardware import is_captured
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.serving import check_device, refuse
from npu_ops_adapters.vllm import functions

_HOME = "vllm_ascend.attention"
_IMPLEMENTATIONS = (
    "attention_v1:AscendAttentionBackendImpl",
    "context_parallel.attention_cp:AscendAttentionCPImpl",
    "fa3_v1:AscendFAImpl",
)


def patches() -> Iterable[Patch]:
    """Patch the methods that attend after new keys and values are in the cache."""
    if env.settings.consistent:
        for name in _IMPLEMENTATIONS:
            yield functions.replaced(
                f"{_HOME}.{name}.forward_impl",
                "attention",
                ours,
                "the vendor's operators sum in another order than training",
                ("self", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
            )


def ours(self, query, key, value, kv_cache, attn_metadata, output):
    """Write output `[T, heads, D]`. Rows after the last sequence are padding."""
    check_device(query)
    _check(self, query)
    starts, ends = attn_metadata.query_start_loc, attn_metadata.actual_seq_lengths_q
    count = min(starts.shape[0] - 1, len(ends))  # 0.23.0 may append a sequence of padding to `ends`
    keys, tokens = attn_metadata.seq_lens[:count], ends[count - 1]
    output[:tokens] = npu_ops.attention(
        query[:tokens],
        self.key_cache,
        self.value_cache,
        layout="TND",
        is_causal=attn_metadata.causal,
        cu_seqlens_q=starts[: count + 1],
        max_seqlen_q=attn_metadata.max_query_len,
        seqlens_k=_on_device(attn_metadata, keys, query.device),
        block_table=attn_metadata.block_tables[:count].to(torch.int32),
        scale=self.scale,
        cu_seqlens_cpu=[0, *ends[:count]],
        seqlens_k_cpu=attn_metadata.seq_lens_list[:count],
    )
    return output


def _check(layer, query) -> None:
    """Raise ValueError for a call that npu-ops does not support; nothing is written yet."""
    functions.check_ranks()
    refuse(
        decode_context_parallel=getattr(layer, "dcp_size", 1) > 1,
        alibi_slopes=layer.alibi_slopes,
        sliding_window=layer.sliding_window,
        sinks=layer.sinks,
    )
    if layer.attn_type != "decoder":
        raise ValueError(f"attn_type: got {layer.attn_type}, needs decoder")
    if layer.key_cache is None or layer.key_cache.dtype != query.dtype:
        got = None if layer.key_cache is None else check.short(layer.key_cache.dtype)
        raise ValueError(f"cache: got {got}, needs {check.short(query.dtype)}")
    if is_captured(query.device):
        raise ValueError("cudagraph_mode: got attention in a graph, needs NONE or PIECEWISE")


def _on_device(metadata, lengths, device) -> torch.Tensor:
    """Copy lengths to the device once per step: the metadata, which layers share, keeps them."""
    kept = vars(metadata)
    if "npu_ops_lengths" not in kept:
        kept["npu_ops_lengths"] = lengths.to(device)
    return kept["npu_ops_lengths"]
