"""Replaces methods of SGLang's NPU backend for Gated Delta Net, which call sgl-kernel-npu directly.

Even from SGLang 0.5.23 on, only the backend's decoding step uses SGLang's kernel dispatcher. So
patching the dispatcher would not be enough.

Layouts of the backend's states:
- Convolution: `[slots, rows, D]`. The last W - 1 rows are the last tokens; the rows before them are
  for draft tokens.
- Delta rule: `[values, keys]` from 0.5.23 on. Before, the version of sgl-kernel-npu determines the
  order, see `gated_delta_net.state_v_first`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

import torch

import npu_ops
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.sglang import causal_conv1d, functions, gated_delta_net, gdn_gate

MODULE = "sglang.srt.hardware_backend.npu.attention.ascend_gdn_backend"
_PARAMETERS = ("self", "layer", "forward_batch", "mixed_qkv", "a", "b", "kwargs")


def patches() -> Iterable[Patch]:
    """Patch the methods for decoding and prefill, with an NPU and SGLang 0.5.20 or newer."""
    if functions.on_npu() and functions.since("0.5.20"):
        for name, ours in (("forward_decode", decode), ("forward_extend", extend)):
            target = f"{MODULE}:AscendGDNAttnBackend.{name}"
            patch = functions.replaced(
                target,
                "gated_delta_net",
                ours,
                "it needs sgl-kernel-npu, whose kernels take only K = V = 128",
                _PARAMETERS,
            )
            yield dataclasses.replace(patch, make=functools.partial(_made, ours, target))


def _made(ours, target, original):
    """Make the replacement; raise if the order of keys and values in the states is unknown."""
    v_first = gated_delta_net.state_v_first()
    return functions.made(functools.partial(ours, v_first=v_first), target, original)


def decode(self, layer, forward_batch, mixed_qkv, a, b, *, v_first, **options):
    """Decode one token of each sequence."""
    functions.check_device(mixed_qkv)
    cache = self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
    slots = self.forward_metadata.mamba_cache_indices
    qkv = npu_ops.causal_conv1d_update(
        mixed_qkv, _last_rows(cache, layer), layer.conv_weights, layer.bias, layer.activation, slots
    )
    with functions.committed():
        o = gated_delta_net.update(
            v_first, _heads(layer, qkv), a, b, layer.A_log, layer.dt_bias, cache.temporal, slots,
            scale=layer.head_k_dim**-0.5,
        )  # fmt: skip
    self._track_mamba_state_decode(forward_batch, cache.conv[0], cache.temporal, slots)
    return o[None]


def extend(self, layer, forward_batch, mixed_qkv, a, b, *, v_first, **options):
    """Process new tokens of each sequence, or draft tokens."""
    functions.check_device(mixed_qkv)
    cache = self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
    if forward_batch.forward_mode.is_target_verify():
        return _verify(self, layer, forward_batch, cache, mixed_qkv, a, b, v_first)
    metadata = self.forward_metadata
    starts, slots = metadata.query_start_loc, metadata.mamba_cache_indices
    if metadata.has_mamba_track_mask:
        tracked = mixed_qkv[metadata.track_conv_indices]
        cache.conv[0][metadata.conv_states_mask_indices] = tracked
    qkv = causal_conv1d.ours(
        mixed_qkv.transpose(0, 1), layer.conv_weights, layer.bias, query_start_loc=starts,
        conv_states=_last_rows(cache, layer), cache_indices=slots, activation=layer.activation,
        has_initial_state=forward_batch.extend_prefix_lens > 0,
    ).transpose(0, 1)  # fmt: skip
    with functions.committed():
        q, k, v = (x[None] for x in _heads(layer, qkv))
        g, beta = gdn_gate.ours(layer.A_log, a, b, layer.dt_bias)
        o, after, between = gated_delta_net.prefill(
            v_first, q, k, v, g, beta, cache.temporal, slots, starts
        )
        functions.write_slots(cache.temporal, slots, after)
    if metadata.has_mamba_track_mask:
        self._track_mamba_state_extend(forward_batch, between, cache.temporal, metadata)
    return o


def _verify(self, layer, forward_batch, cache, mixed_qkv, a, b, v_first):
    """Process equally many draft tokens per sequence; SGLang rolls both states back afterwards.

    SGLang keeps convolution states as if all tokens of the last step had been accepted.
    """
    slots = self.forward_metadata.mamba_cache_indices
    drafted, sequences = forward_batch.spec_info.draft_token_num, slots.shape[0]
    tokens = drafted * sequences
    accepted = torch.full_like(slots, drafted)
    qkv = npu_ops.causal_conv1d_update(
        mixed_qkv[:tokens].unflatten(0, (sequences, drafted)), cache.conv[0].transpose(1, 2),
        layer.conv_weights, layer.bias, layer.activation, slots, accepted,
    ).flatten(0, 1)  # fmt: skip
    with functions.committed():
        o = gated_delta_net.update(
            v_first, _heads(layer, qkv), a[:tokens], b[:tokens], layer.A_log, layer.dt_bias,
            cache.temporal, slots, intermediate_states=cache.intermediate_ssm,
            disable_state_update=True,
        )  # fmt: skip
    return functions.padded(o, mixed_qkv.shape[0])


def _last_rows(cache, layer) -> torch.Tensor:
    """View the pool as `[slots, D, W - 1]`."""
    rows = layer.conv_weights.shape[1] - 1
    return cache.conv[0][:, -rows:].transpose(1, 2)


def _heads(layer, qkv):
    """Split into q, k and v, each `[T, heads, D]`."""
    q, k, v = qkv.split([layer.q_dim, layer.k_dim, layer.v_dim], dim=-1)
    return (
        q.unflatten(-1, (layer.num_q_heads, layer.head_q_dim)),
        k.unflatten(-1, (layer.num_k_heads, layer.head_k_dim)),
        v.unflatten(-1, (layer.num_v_heads, layer.head_v_dim)),
    )
