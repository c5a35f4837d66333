"""Replaces attention over the paged KV cache in SGLang's backend for NPUs, `ascend`.

A captured graph contains sequence lengths. Before each replay torch_npu can update the lengths of
its own operators, by the argument's name. But it finds only calls in SGLang's code, none inside
npu-ops. So if `npu_ops.plan_attention` chooses the operator that SGLang captures and updates,
SGLang's call runs. Otherwise npu-ops runs and reads the lengths from the device.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterable
from typing import Any

import torch

import npu_ops
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.sglang import functions

MODULE = "sglang.srt.hardware_backend.npu.attention.ascend_backend"
_CALL = ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "q_rope", "k_rope")
_WHOLE = (*_CALL, "topk_indices", "sinks", "slopes")
_UPDATED = "npu_fused_infer_attention_score"  # SGLang sets its lengths before each replay
_LEFT = "left to SGLang: latent attention, encoders' keys, quantised caches, context parallelism"
_STAYS = f"; in graphs also {_UPDATED}, if the plan chooses it"


def patches() -> Iterable[Patch]:
    """Patch the backend's methods. Without an NPU, patch nothing."""
    if not functions.on_npu():
        return
    for name, ours, note, signatures in (
        ("forward_extend", extend, _LEFT, (_WHOLE,)),
        ("forward_mixed", extend, _LEFT, ((*_CALL, "topk_indices"),)),
        ("forward_decode", decode, _LEFT, (_WHOLE, (*_WHOLE, "kwargs"))),
        ("forward_mtp", verify, _LEFT + _STAYS, (_CALL, (*_CALL, "sinks"))),
        ("forward_decode_graph", decode_graph, _LEFT + _STAYS, ((*_CALL, "sinks"),)),
    ):
        yield functions.replaced(
            f"{MODULE}:AscendAttnBackend.{name}",
            "attention",
            ours,
            "it ignores windows and soft caps, and computes sequences one by one",
            *signatures,
            note=note.__str__,
        )


def extend(
    self, q, k, v, layer, forward_batch, save_kv_cache=True, q_rope=None, k_rope=None,
    topk_indices=None, sinks=None, slopes=None,
):  # fmt: skip
    """Attend with new tokens of each sequence, after those already in the cache."""
    if _drafted(forward_batch.forward_mode):
        raise functions.NotOursError("it calls forward_mtp, which npu-ops replaces")
    call = Call(self, q, layer, forward_batch, sinks)
    call.check(q_rope=q_rope, k_rope=k_rope, topk_indices=topk_indices, slopes=slopes)
    starts = _starts(forward_batch.extend_seq_lens_cpu)
    keys = self.forward_metadata.seq_lens_cpu_int
    return call.packed(starts, keys, k, v, save_kv_cache)


def decode(
    self, q, k, v, layer, forward_batch, save_kv_cache=True, q_rope=None, k_rope=None,
    topk_indices=None, sinks=None, slopes=None, **options,
):  # fmt: skip
    """Attend with the last token of each sequence: no key needs to be masked."""
    if self.graph_mode:
        raise functions.NotOursError("it calls forward_decode_graph, which npu-ops replaces")
    call = Call(self, q, layer, forward_batch, sinks)
    call.check(q_rope=q_rope, k_rope=k_rope, topk_indices=topk_indices, slopes=slopes)
    call.write(k, v, save_kv_cache)
    keys = self.forward_metadata.seq_lens_cpu_int
    if keys is None:
        return call.one_each(self.forward_metadata.seq_lens)
    return call.one_each(call.on_device(keys), keys)


def verify(
    self, q, k, v, layer, forward_batch, save_kv_cache, q_rope=None, k_rope=None, sinks=None
):
    """Attend with draft tokens of each sequence; each attends to the tokens up to itself."""
    call = Call(self, q, layer, forward_batch, sinks)
    call.check(q_rope=q_rope, k_rope=k_rope)
    if getattr(forward_batch.spec_info, "topk", None) not in (None, 1):
        raise ValueError("topk: got drafts that branch, needs one chain for each sequence")
    verified = forward_batch.forward_mode.is_target_verify()
    each = self.speculative_num_draft_tokens
    if self.graph_mode:
        if not verified:
            raise functions.NotOursError("SGLang updates a draft's graph once per step")
        call.leave_to_sglang(layout="TND", is_causal=True)
        call.write(k, v, save_kv_cache)
        ends = self.forward_metadata.actual_seq_lengths_q
        starts = torch.nn.functional.pad(ends, (1, 0))
        return call.several_each(starts, each, self.forward_metadata.seq_lens)
    tokens = _tokens(q, forward_batch)  # SGLang also passes lengths of padding sequences
    lengths = [each] * (tokens // each) if verified else forward_batch.extend_seq_lens_cpu
    starts = [start for start in _starts(lengths) if start <= tokens]
    keys = self.forward_metadata.seq_lens_cpu_int
    keys = None if keys is None else keys[: len(starts) - 1]
    return call.packed(starts, keys, k, v, save_kv_cache)


def decode_graph(
    self, q, k, v, layer, forward_batch, save_kv_cache=True, q_rope=None, k_rope=None, sinks=None
):
    """Do the same as `decode`, in a graph that is replayed with other lengths."""
    call = Call(self, q, layer, forward_batch, sinks)
    call.check(q_rope=q_rope, k_rope=k_rope)
    if forward_batch.spec_info is not None:
        raise functions.NotOursError("SGLang updates a draft's graph once per step")
    call.leave_to_sglang(layout="BSND", query_length=1)
    call.write(k, v, save_kv_cache)
    return call.one_each(self.forward_metadata.seq_lens)


@dataclasses.dataclass
class Call:
    """A layer's call of the attention backend, with access to its cache and metadata."""

    backend: Any
    q: torch.Tensor
    layer: Any
    forward_batch: Any
    sinks: torch.Tensor | None

    def check(self, **arguments) -> None:
        """Raise for a call that npu-ops does not support, before anything is written."""
        functions.check_device(self.q)
        backend, batch, layer = self.backend, self.forward_batch, self.layer
        if torch.compiler.is_compiling():
            raise functions.NotOursError("SGLang chooses the functions that torch.compile traces")
        if backend.use_mla or getattr(backend, "is_dllm_model", False):
            raise functions.NotOursError("latent attention and diffusion use other calls")
        functions.refuse(
            **arguments,
            use_alibi=getattr(backend, "use_alibi", False),
            ASCEND_USE_FA=getattr(backend, "use_fa", False),
            encoder_lens=batch.encoder_lens,
            is_cross_attention=layer.is_cross_attention,
            use_irope=getattr(layer, "use_irope", False),
            xai_temperature_len=getattr(layer, "xai_temperature_len", -1) > 0,
            attn_cp_metadata=getattr(batch, "attn_cp_metadata", None),
            dcp_block_tables=getattr(backend.forward_metadata, "dcp_block_tables", None),
            dcp_spec_block_tables=getattr(backend.forward_metadata, "dcp_spec_block_tables", None),
        )
        if layer.logit_cap and getattr(layer, "logit_capping_method", "tanh") != "tanh":
            raise ValueError(f"logit_capping_method: got {layer.logit_capping_method}, needs tanh")
        if layer.attn_type.value not in ("decoder", "encoder_only"):
            raise ValueError(
                f"attn_type: got {layer.attn_type.value}, needs decoder or encoder_only"
            )
        for cache in self.caches():
            if cache.dtype != self.q.dtype:
                raise ValueError(f"cache: got {cache.dtype}, needs q's {self.q.dtype}")

    def leave_to_sglang(self, **spec) -> None:
        """Raise NotOursError if SGLang's own call should be captured.

        That is so if `npu_ops.plan_attention` chooses the operator that SGLang captures and
        updates, and the layer has no window.
        """
        layer, backend = self.layer, self.backend
        alone = self.sinks is None and not getattr(backend, "is_hybrid_swa", False)
        plan = npu_ops.plan_attention(
            npu_ops.AttentionSpec(
                **spec, heads=layer.tp_q_head_num, kv_heads=layer.tp_k_head_num,
                head_dim=layer.qk_head_dim, value_dim=layer.v_head_dim, keys="paged",
                dtype=str(self.q.dtype).removeprefix("torch."), block_size=backend.page_size,
                host_lengths=True, window=self.window, softcap=bool(layer.logit_cap),
                graph_capture=True, operators=(_UPDATED,) if alone else (),
            )
        )  # fmt: skip
        if plan.graph_update and self.window is None:  # SGLang's call would lack the window
            raise functions.NotOursError(
                f"SGLang sets {plan.graph_update} of {plan.operator} before each replay"
            )

    def write(self, k, v, save_kv_cache) -> None:
        """Write new keys and values as SGLang does. Repeating it is safe."""
        if save_kv_cache and k is not None and v is not None:
            place = self.forward_batch.out_cache_loc
            both = getattr(sys.modules[MODULE], "KVWriteLoc", None)  # from 0.5.15 on
            if both is not None:
                place = both(place, self.backend.forward_metadata.swa_out_cache_loc)
            self.pool.set_kv_buffer(self.layer, place, k, v)

    def packed(self, starts, keys, k, v, save_kv_cache):
        """Write the keys and values, then attend.

        starts: like cu_seqlens. Tokens after its last entry are padding.
        """
        if keys is None or len(keys) != len(starts) - 1 or starts[-1] > self.q.shape[0]:
            raise ValueError("seq_lens_cpu: got None or other lengths, needs one for each sequence")
        self.write(k, v, save_kv_cache)
        starts = torch.tensor(starts, dtype=torch.int32, device="cpu")
        longest = int(starts.diff().max())
        on_device = self.on_device(starts), longest, self.on_device(keys)
        return self.several_each(*on_device, int(starts[-1]), starts, keys)

    def several_each(self, starts, longest, keys, tokens=None, starts_cpu=None, keys_cpu=None):
        """Attend with queries `[T, heads * D]`, of which the first `tokens` are not padding."""
        return self.attend(
            self.q[:tokens].reshape(-1, self.layer.tp_q_head_num, self.layer.qk_head_dim),
            layout="TND", cu_seqlens_q=starts, max_seqlen_q=longest, cu_seqlens_cpu=starts_cpu,
            is_causal=self.layer.attn_type.value == "decoder", seqlens_k=keys,
            seqlens_k_cpu=keys_cpu, block_table=self.blocks[: starts.shape[0] - 1],
        )  # fmt: skip

    def one_each(self, keys, keys_cpu=None):
        """Attend with one query per sequence; rows after the last sequence are padding."""
        blocks = self.blocks
        q = self.q[: blocks.shape[0]]
        return self.attend(
            q.reshape(-1, 1, self.layer.tp_q_head_num, self.layer.qk_head_dim),
            layout="BSND", seqlens_k=keys, seqlens_k_cpu=keys_cpu, block_table=blocks,
        )  # fmt: skip

    def attend(self, q, **lengths):
        """Attend with the layer's settings. Return `[T, heads * D]`, with zeros for padding."""
        layer = self.layer
        out = npu_ops.attention(
            q, *self.caches(), scale=layer.scaling, window=self.window, sinks=self.sinks,
            softcap=layer.logit_cap or None, **lengths,
        )  # fmt: skip
        out = out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)
        return functions.padded(out, self.q.shape[0])

    @property
    def window(self):
        """Return the window as (left, right). SGLang counts the keys before the query's own key."""
        left = self.layer.sliding_window_size
        return None if left is None or left < 0 else (left, 0)

    @property
    def pool(self):
        """Return the KV cache's pool: the backend's from 0.5.15 on, before that the batch's."""
        return vars(self.backend).get("token_to_kv_pool") or self.forward_batch.token_to_kv_pool

    def caches(self):
        """Return keys and values, `[blocks, size, heads, D]`."""
        layer, pool = self.layer, self.pool
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        size = self.backend.page_size
        return (
            keys.view(-1, size, layer.tp_k_head_num, layer.qk_head_dim),
            values.view(-1, size, layer.tp_v_head_num, layer.v_head_dim),
        )

    @property
    def blocks(self):
        """Return the block table, int32 `[n, ..]`. Layers with a window may have their own."""
        metadata = self.backend.forward_metadata
        own = self.window is not None and getattr(self.backend, "is_hybrid_swa", False)
        return (metadata.block_tables_swa if own else metadata.block_tables).to(torch.int32)

    def on_device(self, lengths):
        """Copy lengths to the device once per step.

        The step's metadata, which all layers share, caches the copies.
        """
        kept = vars(self.backend.forward_metadata).setdefault("npu_ops", {})
        known = tuple(lengths.tolist())
        if known not in kept:
            kept[known] = lengths.to(self.q.device)
        return kept[known]


def _starts(lengths) -> list[int]:
    return [0, *itertools.accumulate(map(int, lengths))]


def _drafted(mode) -> bool:
    """Return whether this is a pass over draft tokens, which SGLang sends to `forward_mtp`."""
    names = ("is_target_verify", "is_draft_extend", "is_draft_extend_v2")
    return any(getattr(mode, name)() for name in names if hasattr(mode, name))


def _tokens(q, forward_batch) -> int:
    """Return the number of tokens without padding. SGLang renamed the field in 0.5.20."""
    names = ("global_num_token_non_padded_cpu", "num_token_non_padded_cpu")
    found = (getattr(forward_batch, name, None) for name in names)
    return next((int(n) for n in found if n is not None), q.shape[0])
