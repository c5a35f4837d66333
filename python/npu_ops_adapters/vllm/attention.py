"""With NPU_OPS_CONSISTENT, attention over the paged cache has the bits of training.

vllm-ascend calls the vendor's operators, which sum in another order. In the default mode they stay,
because they are faster.

The vendor's operators take lengths as lists, which a graph of decoding steps freezes. In a graph
npu-ops reads lengths on the device, from vllm-ascend's own buffers, which vllm-ascend fills before
each replay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

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
        yield Patch(
            target=f"{_HOME}.attention_v1:AscendAttentionMetadataBuilder.build",
            op="attention",
            make=_with_buffers,
            why="its lengths are lists and new tensors, which a graph would freeze",
            signatures=(("self", "common_prefix_len", "common_attn_metadata", "fast_build"),),
            versions=functions.VERSIONS,
            remove_when="vllm-ascend's metadata has the buffers",
        )


class Buffers(NamedTuple):
    """vllm-ascend's device memory that describes the sequences of a step.

    starts: `[sequences + 1]`, cu_seqlens of the queries.
    lengths: `[sequences]`, the numbers of keys.
    table: the block table, a row per sequence.
    captured: addresses that captured graphs read; all steps share this set.

    Each padding row of a decoding graph is a sequence of one query without keys.
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor
    captured: set[tuple[int, ...]]

    def addresses(self) -> tuple[int, ...]:
        return tuple(x.data_ptr() for x in self[:3])


def _with_buffers(build: Callable) -> Callable:
    """Return vllm-ascend's `build`, whose metadata also gets `npu_ops_buffers`."""

    @functools.wraps(build, assigned=(), updated=())
    def npu_ops_build(self, common_prefix_len, common_attn_metadata, *args, **kwargs):
        metadata = build(self, common_prefix_len, common_attn_metadata, *args, **kwargs)
        common = common_attn_metadata
        captured = vars(self).setdefault("npu_ops_captured", set())
        metadata.npu_ops_buffers = buffers = Buffers(
            common.query_start_loc, common.seq_lens, common.block_table_tensor, captured
        )
        if captured and buffers.addresses() not in captured:
            raise RuntimeError(
                "cudagraph_mode: got lengths in other memory than graphs read with "
                "NPU_OPS_CONSISTENT, needs NONE or PIECEWISE"
            )
        return metadata

    return npu_ops_build


def ours(self, query, key, value, kv_cache, attn_metadata, output):
    """Attend with query `[T, heads, D]` to the paged cache; write and return output.

    output has query's shape. Rows after the last sequence are padding.
    """
    check_device(query)
    _check(self, query)
    find = _in_graph if is_captured(query.device) else _of_step
    tokens, lengths = find(self, query, attn_metadata)
    output[:tokens] = npu_ops.attention(
        query[:tokens],
        self.key_cache,
        self.value_cache,
        layout="TND",
        is_causal=attn_metadata.causal,
        max_seqlen_q=attn_metadata.max_query_len,
        scale=self.scale,
        **lengths,
    )
    return output


def _of_step(layer, query, metadata) -> tuple[int, dict]:
    """Return the number of tokens, and the lengths as arguments of `npu_ops.attention`."""
    starts, ends = metadata.query_start_loc, metadata.actual_seq_lengths_q
    count = min(starts.shape[0] - 1, len(ends))  # 0.23.0 may append a sequence of padding to `ends`
    return ends[count - 1], {
        "cu_seqlens_q": starts[: count + 1],
        "seqlens_k": _on_device(metadata, metadata.seq_lens[:count], query.device),
        "block_table": metadata.block_tables[:count].to(torch.int32),
        "cu_seqlens_cpu": [0, *ends[:count]],
        "seqlens_k_cpu": metadata.seq_lens_list[:count],
    }


def _in_graph(layer, query, metadata) -> tuple[int, dict]:
    """Return what `_of_step` returns, but without lengths on the host: graph replays change them.

    Raises:
        ValueError: the graph is not for decoding alone, the metadata is from another builder, or
            the lengths are not on the device.
    """
    mode = layer.vllm_config.compilation_config.cudagraph_mode
    if not mode.separate_routine():  # one graph for prompts too: the number of sequences varies
        needs = "NONE, PIECEWISE or FULL_DECODE_ONLY"
        raise ValueError(f"cudagraph_mode: got {mode.name}, needs {needs}")
    buffers = getattr(metadata, "npu_ops_buffers", None)
    if buffers is None:
        raise ValueError("attn_metadata: got another builder's, needs that of attention_v1")
    for x in buffers[:3]:
        check_device(x)
    buffers.captured.add(buffers.addresses())
    count = buffers.lengths.shape[0]
    return query.shape[0], {
        "cu_seqlens_q": buffers.starts[: count + 1],
        "seqlens_k": buffers.lengths,
        "block_table": buffers.table[:count],
    }


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


def _on_device(metadata, lengths, device) -> torch.Tensor:
    """Copy lengths to the device once per step: the metadata, which layers share, keeps them."""
    kept = vars(metadata)
    if "npu_ops_lengths" not in kept:
        kept["npu_ops_lengths"] = lengths.to(device)
    return kept["npu_ops_lengths"]
