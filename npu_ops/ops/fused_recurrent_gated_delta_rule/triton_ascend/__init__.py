"""Shared by fused_recurrent_gated_delta_rule and chunk_kda: runs token by token, in Triton.

For Ascend and NVIDIA. Reference: reference.py. chunk_kda runs the forward, with chunk_size 1.

A program keeps BV value columns of one head's state on chip, in fp32, in the order that the state
has in memory. It loops over the tokens and uses only vector instructions. Columns do not depend on
each other, so several programs can divide the columns of a head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from npu_ops.core.grid import cdiv, tile_elements, vector_grid
from npu_ops.core.lengths_triton_ascend import finish, int32_starts
from npu_ops.ops.fused_recurrent_gated_delta_rule.triton_ascend.states import (
    columns_of,
    keys_of,
    load_row,
    over_keys,
    over_values,
    state_tile,
    tile_constants,
    values_of,
    within,
)

# State elements in a tile, from the bytes that the vendor's compiler reserves on chip per element.
TILE = tile_elements(40)
TILE_BACKWARD = tile_elements(80)
# Tokens between two stored states (checkpoints). For each token, the backward recomputes the state
# from the last checkpoint before the token. So no launch reads a state that the same launch wrote.
SEGMENT = 16


@triton.jit
def span_of(cu_seqlens, n, length):
    """Return where sequence n begins and ends in the tokens, int32.

    With cu_seqlens there is one batch element. Invalid cu_seqlens are clamped to 0 to `length`.
    """
    if cu_seqlens is None:
        return n * length, (n + 1) * length
    else:
        begin = tl.load(cu_seqlens + n).to(tl.int32)
        end = tl.load(cu_seqlens + n + 1).to(tl.int32)
        return within(begin, end, length)


@triton.jit
def decayed(state, g, gk, gv, row, key, value, K: tl.constexpr, V: tl.constexpr,
            V_FIRST: tl.constexpr):  # fmt: skip
    """Return the state after the decay of a token."""
    if g is not None or gk is not None:
        log = tl.zeros(key.shape, tl.float32)
        if g is not None:
            log += tl.load(g + row).to(tl.float32)
        if gk is not None:
            log += load_row(gk, row, key, K)
        state = state * keys_of(tl.exp(log), V_FIRST)
    if gv is not None:
        state = state * values_of(tl.exp(load_row(gv, row, value, V)), V_FIRST)
    return state


@triton.jit
def load_beta(beta, row, value, V: tl.constexpr, PER_VALUE: tl.constexpr):
    if PER_VALUE:
        return load_row(beta, row, value, V)
    else:
        return tl.load(beta + row).to(tl.float32)


@triton.jit
def written(state, k, v, beta, row, qk_row, key, value, K: tl.constexpr, V: tl.constexpr,
            V_FIRST: tl.constexpr, PER_VALUE: tl.constexpr):  # fmt: skip
    """Return a token's key as a tile, the error of the decayed state, and beta.

    The error is the token's value minus the value that the state recalls for the key.
    """
    b_k = keys_of(load_row(k, qk_row, key, K), V_FIRST)
    error = load_row(v, row, value, V) - over_keys(state * b_k, V_FIRST)
    return b_k, error, load_beta(beta, row, value, V, PER_VALUE)


@triton.jit
def advanced(state, k, v, g, gk, gv, beta, row, qk_row, key, value, K: tl.constexpr,
             V: tl.constexpr, V_FIRST: tl.constexpr, PER_VALUE: tl.constexpr):  # fmt: skip
    """Return the state after a token."""
    state = decayed(state, g, gk, gv, row, key, value, K, V, V_FIRST)
    b_k, error, b_beta = written(state, k, v, beta, row, qk_row, key, value, K, V, V_FIRST,
                                 PER_VALUE)  # fmt: skip
    return state + b_k * values_of(error * b_beta, V_FIRST)


@triton.jit
def load_state(states, here, at, exists):
    """Load a tile of a state in fp32; 0 if there are no states."""
    if states is not None:
        return tl.load(states + here + at, mask=exists, other=0.0).to(tl.float32)
    else:
        return tl.zeros(at.shape, tl.float32)


@triton.jit(do_not_specialize=["sequences", "length"])
def _forward_kernel(
    q, k, v, g, gk, gv, beta, initial_state, cu_seqlens, scale, o, final_state, sequences, length,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr,
    PER_VALUE: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (V + BV - 1) // BV
    key = tl.arange(0, BK)
    for item in range(tl.program_id(0), sequences * HV * blocks, tl.num_programs(0)):
        n, head, value, at, exists = columns_of(item, HV, K, V, V_FIRST, BK, BV)
        here = tl.cast(n * HV + head, tl.int64) * (K * V)
        state = load_state(initial_state, here, at, exists)
        begin, end = span_of(cu_seqlens, n, length)
        for token in range(begin, end):
            row = tl.cast(token, tl.int64) * HV + head
            qk_row = tl.cast(token, tl.int64) * H + head // (HV // H)
            state = advanced(state, k, v, g, gk, gv, beta, row, qk_row, key, value, K, V, V_FIRST,
                             PER_VALUE)  # fmt: skip
            b_q = keys_of(load_row(q, qk_row, key, K) * scale, V_FIRST)
            read = over_keys(state * b_q, V_FIRST).to(o.dtype.element_ty)
            tl.store(o + row * V + value, read, mask=value < V)
        if final_state is not None:
            tl.store(final_state + here + at, state, mask=exists)


def fused_recurrent_gated_delta_rule(
    q, k, v, g, gk, gv, beta, initial_state, cu_seqlens, scale, state_v_first, o, final_state
):
    """Write o, and final_state unless it is None. Arguments as in the operator."""
    batch, length, heads, keys = q.shape
    value_heads, values = v.shape[2:]
    sequences = batch if cu_seqlens is None else cu_seqlens.numel() - 1
    constants = tile_constants(keys, values, TILE)
    items = sequences * value_heads * cdiv(values, constants["BV"])
    _forward_kernel[vector_grid(items, q.device)](
        q, k, v, g, gk, gv, beta, initial_state, cu_seqlens, scale, o, final_state, sequences,
        length, H=heads, HV=value_heads, K=keys, V=values, V_FIRST=state_v_first,
        PER_VALUE=beta.shape[-1] == values, **constants,
    )  # fmt: skip
    finish(int32_starts(cu_seqlens), o, states=(final_state,))


@triton.jit(do_not_specialize=["sequences", "length"])
def _checkpoint_kernel(
    k, v, g, gk, gv, beta, initial_state, cu_seqlens, checkpoints, sequences, length,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr,
    PER_VALUE: tl.constexpr, SEGMENT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Store the state before every SEGMENT-th token of a sequence."""
    blocks: tl.constexpr = (V + BV - 1) // BV
    key = tl.arange(0, BK)
    for item in range(tl.program_id(0), sequences * HV * blocks, tl.num_programs(0)):
        n, head, value, at, exists = columns_of(item, HV, K, V, V_FIRST, BK, BV)
        state = load_state(initial_state, tl.cast(n * HV + head, tl.int64) * (K * V), at, exists)
        begin, end = span_of(cu_seqlens, n, length)
        for segment in range(0, tl.cdiv(end - begin, SEGMENT)):
            start = begin + segment * SEGMENT
            place = tl.cast(begin // SEGMENT + n + segment, tl.int64) * HV + head
            tl.store(checkpoints + place * (K * V) + at, state, mask=exists)
            for token in range(start, min(start + SEGMENT, end)):
                row = tl.cast(token, tl.int64) * HV + head
                qk_row = tl.cast(token, tl.int64) * H + head // (HV // H)
                state = advanced(state, k, v, g, gk, gv, beta, row, qk_row, key, value, K, V,
                                 V_FIRST, PER_VALUE)  # fmt: skip


@triton.jit(do_not_specialize=["sequences", "length", "tokens"])
def _backward_kernel(
    grad_o, grad_final_state, q, k, v, g, gk, gv, beta, cu_seqlens, checkpoints, scale,
    grad_q, grad_k, grad_v, grad_g, grad_gk, grad_gv, grad_beta, grad_initial_state,
    sequences, length, tokens,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr,
    PER_VALUE: tl.constexpr, SEGMENT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Loop over the tokens backwards, and write their gradients.

    Every block of values contributes to the gradients of q, k, g and gk, and of beta if beta is one
    number per head. The blocks write their parts separately, and the caller sums them.
    """
    blocks: tl.constexpr = (V + BV - 1) // BV
    key = tl.arange(0, BK)
    for item in range(tl.program_id(0), sequences * HV * blocks, tl.num_programs(0)):
        n, head, block = item // (HV * blocks), item // blocks % HV, item % blocks
        value = block * BV + tl.arange(0, BV)
        at, exists = state_tile(key, value, K, V, V_FIRST)
        here = tl.cast(n * HV + head, tl.int64) * (K * V)
        grad_state = load_state(grad_final_state, here, at, exists)
        begin, end = span_of(cu_seqlens, n, length)
        for back in range(0, end - begin):
            token = end - 1 - back
            segment = (token - begin) // SEGMENT
            place = tl.cast(begin // SEGMENT + n + segment, tl.int64) * HV + head
            state = load_state(checkpoints, place * (K * V), at, exists)
            for before in range(begin + segment * SEGMENT, token):
                row = tl.cast(before, tl.int64) * HV + head
                qk_row = tl.cast(before, tl.int64) * H + head // (HV // H)
                state = advanced(state, k, v, g, gk, gv, beta, row, qk_row, key, value, K, V,
                                 V_FIRST, PER_VALUE)  # fmt: skip
            row = tl.cast(token, tl.int64) * HV + head
            qk_row = tl.cast(token, tl.int64) * H + head // (HV // H)
            part = tl.cast(block, tl.int64) * tokens * HV + row
            state = decayed(state, g, gk, gv, row, key, value, K, V, V_FIRST)
            b_k, error, b_beta = written(state, k, v, beta, row, qk_row, key, value, K, V, V_FIRST,
                                         PER_VALUE)  # fmt: skip
            write = values_of(error * b_beta, V_FIRST)
            b_grad_o = values_of(load_row(grad_o, row, value, V), V_FIRST)
            b_grad_q = over_values((state + b_k * write) * b_grad_o, V_FIRST) * scale
            tl.store(grad_q + part * K + key, b_grad_q, mask=key < K)
            grad_state += keys_of(load_row(q, qk_row, key, K) * scale, V_FIRST) * b_grad_o
            grad_write = over_keys(grad_state * b_k, V_FIRST)
            grad_error = grad_write * b_beta
            tl.store(grad_v + row * V + value, grad_error, mask=value < V)
            if PER_VALUE:
                tl.store(grad_beta + row * V + value, grad_write * error, mask=value < V)
            else:
                tl.store(grad_beta + part, tl.sum(grad_write * error, 0))
            b_grad_error = values_of(grad_error, V_FIRST)
            b_grad_k = over_values(grad_state * write - state * b_grad_error, V_FIRST)
            tl.store(grad_k + part * K + key, b_grad_k, mask=key < K)
            grad_state -= b_k * b_grad_error
            grad_log = grad_state * state
            if grad_g is not None:
                tl.store(grad_g + part, tl.sum(over_values(grad_log, V_FIRST), 0))
            if grad_gk is not None:
                tl.store(grad_gk + part * K + key, over_values(grad_log, V_FIRST), mask=key < K)
            if grad_gv is not None:
                tl.store(grad_gv + row * V + value, over_keys(grad_log, V_FIRST), mask=value < V)
            grad_state = decayed(grad_state, g, gk, gv, row, key, value, K, V, V_FIRST)
        if grad_initial_state is not None:
            tl.store(grad_initial_state + here + at, grad_state, mask=exists)


def fused_recurrent_gated_delta_rule_backward(
    grad_o, grad_final_state, q, k, v, g, gk, gv, beta, initial_state, cu_seqlens, scale,
    state_v_first,
    grad_q, grad_k, grad_v, grad_g, grad_gk, grad_gv, grad_beta, grad_initial_state,
):  # fmt: skip
    """Write the gradients that are not None; all are fp32."""
    batch, length, heads, keys = q.shape
    value_heads, values = v.shape[2:]
    tokens = batch * length
    sequences = batch if cu_seqlens is None else cu_seqlens.numel() - 1
    constants = tile_constants(keys, values, TILE_BACKWARD) | {
        "H": heads, "HV": value_heads, "K": keys, "V": values, "V_FIRST": state_v_first,
        "PER_VALUE": beta.shape[-1] == values, "SEGMENT": SEGMENT,
    }  # fmt: skip
    blocks = cdiv(values, constants["BV"])
    kept = (tokens // SEGMENT + sequences, value_heads, keys * values)
    checkpoints = q.new_empty(kept, dtype=torch.float32)
    grid = vector_grid(sequences * value_heads * blocks, q.device)
    _checkpoint_kernel[grid](
        k, v, g, gk, gv, beta, initial_state, cu_seqlens, checkpoints, sequences, length,
        **constants,
    )  # fmt: skip

    def parts(gradient, *width):
        shape = (blocks, batch, length, value_heads, *width)
        return None if gradient is None else gradient.new_empty(shape)

    per_value = constants["PER_VALUE"]
    grad_q_parts, grad_k_parts = parts(grad_q, keys), parts(grad_k, keys)
    grad_g_parts, grad_gk_parts = parts(grad_g), parts(grad_gk, keys)
    grad_beta_parts = grad_beta if per_value else parts(grad_beta, 1)
    _backward_kernel[grid](
        grad_o, grad_final_state, q, k, v, g, gk, gv, beta, cu_seqlens, checkpoints, scale,
        grad_q_parts, grad_k_parts, grad_v, grad_g_parts, grad_gk_parts, grad_gv, grad_beta_parts,
        grad_initial_state, sequences, length, tokens, **constants,
    )  # fmt: skip
    for total, summed in ((grad_q, grad_q_parts), (grad_k, grad_k_parts)):
        total.copy_(summed.unflatten(3, (heads, -1)).sum((0, 4)))
    for total, summed in (
        (grad_g, grad_g_parts),
        (grad_gk, grad_gk_parts),
        (grad_beta, grad_beta_parts),
    ):
        if total is not None and total is not summed:
            total.copy_(summed.sum(0))
    finish(
        int32_starts(cu_seqlens), grad_q, grad_k, grad_v, grad_g, grad_gk, grad_gv, grad_beta,
        states=(grad_initial_state,),
    )  # fmt: skip
