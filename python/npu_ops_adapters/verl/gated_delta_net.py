"""Computes Gated Delta Net of packed sequences, also if verl's Ulysses splits them over ranks.

verl's own function computes the sequences one by one, and needs fla with Ulysses. npu-ops computes
all sequences in one call. With Ulysses each rank computes some of the heads for all tokens, as in
attention, so no state passes between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

import npu_ops
from npu_ops_adapters.calls import DEVICES
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.verl import ulysses


def patches() -> Iterable[Patch]:
    """Patch the function that verl sets as the forward of Qwen3.5's layers."""
    yield Patch(
        target="verl.models.transformers.qwen3_5:qwen3_5_gated_delta_net_forward",
        op="gated_delta_net",
        make=_replace,
        why="it runs packed sequences one by one, and without fla not over several ranks",
        signatures=(
            (
                *("self", "hidden_states", "cache_params", "attention_mask", "cu_seqlens"),
                "cu_seqlens_cpu",
            ),
        ),
        versions="verl 0.9.1",
        remove_when="verl checks for functions that take packed sequences instead of for fla",
    )


def _replace(original: Callable) -> Callable:
    def npu_ops_gated_delta_net_forward(
        self, hidden_states, cache_params=None, attention_mask=None, cu_seqlens=None,
        cu_seqlens_cpu=None,
    ):  # fmt: skip
        packed = cu_seqlens is not None and cache_params is None and attention_mask is None
        if not packed or not _is_ours(self, hidden_states, cu_seqlens, cu_seqlens_cpu):
            return original(
                self, hidden_states, cache_params, attention_mask, cu_seqlens, cu_seqlens_cpu
            )
        return _forward(self, hidden_states, cu_seqlens)

    return npu_ops_gated_delta_net_forward


def _is_ours(layer, x, cu_seqlens, cu_seqlens_cpu) -> bool:
    """Return whether npu-ops supports the call.

    cu_seqlens must end at the number of all ranks' tokens. The number of ranks must divide the
    numbers of heads.
    """
    ranks = ulysses.size()
    total = int((cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu)[-1])
    shared = layer.num_k_heads % ranks == 0 and layer.num_v_heads % ranks == 0
    known = layer.activation in ("silu", "swish") and x.device.type in DEVICES
    return known and shared and x.shape[0] == 1 and x.shape[1] * ranks == total


def _forward(layer, x, cu_seqlens):
    columns, gates = _gathered(layer, x)
    share = {"num_k_heads": layer.num_k_heads, "num_v_heads": layer.num_v_heads}
    share = {name: heads // ulysses.size() for name, heads in share.items()}
    weight, bias = (_channels(layer, p) for p in (layer.conv1d.weight, layer.conv1d.bias))
    q, k, v, _ = npu_ops.causal_conv1d_qkv(
        columns, weight[:, 0], bias, head_k_dim=layer.head_k_dim, head_v_dim=layer.head_v_dim,
        cu_seqlens=cu_seqlens, use_qk_l2norm=False, **share,
    )  # fmt: skip
    a, b = gates.chunk(2, dim=-1)
    g, beta = npu_ops.gdn_gate(a, _heads(layer.A_log), _heads(layer.dt_bias), b)
    o, _ = npu_ops.chunk_gated_delta_rule(
        q, k, v, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens
    )
    if ulysses.size() > 1:
        o = ulysses.gather_heads(o, tokens=1, heads=2)
    z = layer.in_proj_z(x)
    o = layer.norm(o.reshape(-1, layer.head_v_dim), z.reshape(-1, layer.head_v_dim))
    return layer.out_proj(o.reshape(z.shape))


def _gathered(layer, x):
    """Return q, k and v side by side, and a and b side by side, for this rank's heads.

    x: this rank's part of the tokens. The result has all tokens.
    """
    qkv, a, b = layer.in_proj_qkv(x), layer.in_proj_a(x), layer.in_proj_b(x)
    ranks = ulysses.size()
    if ranks == 1:
        return qkv, torch.cat((a, b), dim=-1)
    parts = [*qkv.split([layer.key_dim, layer.key_dim, layer.value_dim], dim=-1), a, b]
    # Exchange all parts at once. Dimension 2 is the receiving rank: each part's heads of that rank.
    rows = torch.cat([part.unflatten(-1, (ranks, -1)) for part in parts], dim=-1)
    mine = ulysses.gather_tokens(rows, tokens=1, heads=2)[:, :, 0]
    return mine.split([qkv.shape[-1] // ranks, 2 * a.shape[-1] // ranks], dim=-1)


def _channels(layer, parameter):
    """Return a convolution parameter's channels for this rank's heads of q, k and v."""
    if parameter is None or ulysses.size() == 1:
        return parameter
    parts = parameter.split([layer.key_dim, layer.key_dim, layer.value_dim])
    return torch.cat([_heads(part) for part in parts])


def _heads(parameter):
    """Return this rank's share of a parameter with a value per head."""
    return parameter.chunk(ulysses.size())[ulysses.rank()] if ulysses.size() > 1 else parameter
