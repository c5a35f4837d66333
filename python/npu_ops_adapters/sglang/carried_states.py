"""With NPU_OPS_CONSISTENT=chunks, states of Gated Delta Net carry their unfinished chunk.

A carried state is the state before the unfinished chunk, followed by rows for that chunk's tokens;
see `npu_ops.unfinished_rows`. So states in the pool get more rows. SGLang copies, caches, sends and
clears a slot as a whole, so a chunk's tokens always move with their state. Continuing a prompt or
decoding a token then gives the bits that the sequence has in training.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable

import torch

import npu_ops
from npu_ops.core import check, env, make
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.sglang import functions

_PARAMETERS = (
    *("tp_world_size", "intermediate_size", "n_groups", "num_heads", "head_dim", "state_size"),
    *("conv_kernel", "conv_shard_groups"),
)


def patches() -> Iterable[Patch]:
    """Patch the function that returns a state's shape, from which SGLang makes its pools."""
    if in_force():
        yield Patch(
            target="sglang.srt.configs.mamba_utils:Mamba2StateShape.create",
            op="gated_delta_net",
            make=_with_more_rows,
            why="NPU_OPS_CONSISTENT=chunks keeps the unfinished chunk beside each state",
            signatures=(_PARAMETERS,),
            versions="SGLang 0.5.23",
            remove_when="SGLang keeps the tokens of unfinished chunks itself",
        )


def in_force() -> bool:
    return env.settings.consistent == "chunks"


def _with_more_rows(original: Callable) -> staticmethod:
    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_create(*args, conv_shard_groups=None, **kwargs):
        shape = original(*args, conv_shard_groups=conv_shard_groups, **kwargs)
        if conv_shard_groups is None:  # a Mamba2 layer
            return shape
        heads, values, keys = shape.temporal
        rows = values + npu_ops.unfinished_rows(keys, values)
        return dataclasses.replace(shape, temporal=(heads, rows, keys))

    return staticmethod(npu_ops_create)


def check_pool(pool: torch.Tensor) -> None:
    """Raise TypeError unless states are fp32, as they are in training."""
    if pool.dtype != torch.float32:
        raise TypeError(
            f"ssm_states: got {check.short(pool.dtype)} with NPU_OPS_CONSISTENT=chunks, needs "
            "float32 (--mamba-ssm-dtype float32)"
        )


def parts(rows, values: int, pool):
    """Split a decoding step's rows `[T, 2 H K + HV V]` into q, k and v.

    values: V; it cannot be derived from the shape of a carried state.
    """
    value_heads, keys = pool.shape[1], pool.shape[3]
    width = (rows.shape[1] - value_heads * values) // 2
    q, k, v = rows.split((width, width, value_heads * values), 1)
    return *(x.unflatten(1, (-1, keys)) for x in (q, k)), v.unflatten(1, (-1, values))


def rule(q, k, v, g, beta, states, starts, **options):
    """Return o `[T, HV, V]` of packed tokens `[T, heads, ...]`, and the states after them."""
    o, after = npu_ops.chunk_gated_delta_rule(
        *(x[None] for x in (q, k, v, g, beta)), initial_state=states, cu_seqlens=starts,
        output_final_state=True, use_qk_l2norm_in_kernel=True, state_v_first=True,
        carry_unfinished=True, **options,
    )  # fmt: skip
    return o[0], after


def update(
    qkv, a, b, A_log, dt_bias, pool, slots, *, scale=None, cu_seqlens=None,
    intermediate_states=None, intermediate_state_indices=None, disable_state_update=False,
):  # fmt: skip
    """Compute `npu_ops.gated_delta_rule_update` with carried states.

    qkv: q, k and v, each `[T, heads, ...]`.
    intermediate_states: if given, the tokens are draft tokens, equally many per sequence. They are
    processed one by one, and the state after each is stored there.
    """
    check_pool(pool)
    gates = npu_ops.gdn_gate(a, A_log, dt_bias, b)
    tokens, count, states = (*qkv, *gates), slots.shape[0], functions.read_slots(pool, slots)
    one_each = make.counted(count + 1, device=slots.device)
    if intermediate_states is None:
        starts = one_each if cu_seqlens is None else cu_seqlens
        o, states = rule(*tokens, states, starts, scale=scale)
    else:
        rows = one_each[:-1] if intermediate_state_indices is None else intermediate_state_indices
        rows, found = torch.where(slots >= 0, rows, -1), []
        for step in range(a.shape[0] // count):
            taken = (x.unflatten(0, (count, -1))[:, step] for x in tokens)
            o, states = rule(*taken, states, one_each, scale=scale)
            functions.write_slots(intermediate_states[:, step], rows, states)
            found.append(o)
        o = torch.stack(found, 1).flatten(0, 1)
    if not disable_state_update:
        functions.write_slots(pool, slots, states)
    return o
