"""Shared by gated_delta_rule_update and chunk_gated_delta_rule: runs the decoding step in Triton.

For Ascend and NVIDIA. Reference: reference.py. chunk_gated_delta_rule runs it for chunk_size 1.

A program loads the state of BV value columns of one head, loops over the sequence's few tokens, and
stores the state. It uses only vector instructions, and reads and writes each state once.

Plain decoding has a kernel without that loop, `_decode_kernel`: one token of each sequence, states
with values first, and raw gates. Calls with ready gates (g and beta) always use the loop, so that
the bits of a sequence do not depend on how its tokens are divided over calls.
"""

from __future__ import annotations

import triton
import triton.language as tl

from npu_ops.core.activations_triton_ascend import sigmoid
from npu_ops.core.grid import cdiv, next_power_of_2, tile_elements, vector_grid
from npu_ops.core.lengths_triton_ascend import STARTS, int32_starts, looked_at, span_of
from npu_ops.ops.fused_recurrent_gated_delta_rule.triton_ascend.states import (
    keys_of,
    load_row,
    over_keys,
    state_tile,
    tile_constants,
    values_of,
)
from npu_ops.ops.gdn_gate.softplus import is_plain
from npu_ops.ops.gdn_gate.triton_ascend import rate_of

# State elements per tile. Argument: on-chip bytes that the vendor's compiler reserves for each.
TILE = tile_elements(40)
DECODE_TILE = tile_elements(20)
# Heads in a tile of `_decode_kernel`. Numbers per head, e.g. gates, are vectors of this length.
DECODE_HEADS = 4


@triton.jit
def _span(cu_seqlens, n, sequences, length, tokens, right, last):
    """Return where sequence n begins, and its number of tokens.

    n == sequences stands for the tokens after the last sequence.
    """
    if cu_seqlens is None:
        return tl.cast(n * length, tl.int64), length
    else:
        begin, end = span_of(cu_seqlens, n, sequences, tokens, right, last)
        return tl.cast(begin, tl.int64), end - begin


@triton.jit
def _normalized(x, NORMALIZE: tl.constexpr):
    if NORMALIZE:
        return x / tl.sqrt(tl.sum(x * x, 0) + 1e-6)
    else:
        return x


@triton.jit
def _accepted(num_accepted_tokens, n):
    """Return how many tokens of its last step sequence n accepted; 0 if the argument is None."""
    if num_accepted_tokens is None:
        return 0
    else:
        return tl.load(num_accepted_tokens + n).to(tl.int32)


@triton.jit
def _first_slot(state_indices, accepted, n, count, slots, steps, index_n, index_t,
                COUNTED: tl.constexpr, SLOT_PER_TOKEN: tl.constexpr):  # fmt: skip
    """Return the slot of sequence n's initial state, and whether it and the counts are valid."""
    column = 0
    valid = accepted >= 0
    if SLOT_PER_TOKEN:
        valid = valid & (count <= steps)
        if COUNTED:
            valid = valid & (accepted >= 1) & (accepted <= steps)
            column = tl.minimum(tl.maximum(accepted - 1, 0), steps - 1)
    slot = tl.load(state_indices + n * index_n + column * index_t).to(tl.int32)
    return slot, valid & (slot >= 0) & (slot < slots)


@triton.jit
def _kept_row(intermediate_states, intermediate_state_indices, accepted, n, count, rows, steps):
    """Return sequence n's row of the intermediate states, -1 for none, and whether it is valid."""
    if intermediate_states is None:
        return -1, accepted >= 0
    else:
        row = tl.cast(n, tl.int32)
        if intermediate_state_indices is not None:
            row = tl.load(intermediate_state_indices + n).to(tl.int32)
        least = tl.where(accepted > 0, 0, -1)
        return row, (row >= least) & (row < rows) & (count <= steps) & (accepted <= steps)


@triton.jit
def _load(states, place, key, value, keys, K: tl.constexpr, V: tl.constexpr,
          V_FIRST: tl.constexpr):  # fmt: skip
    """Load a tile of the state at `place` in fp32; zeros if `keys` is 0 instead of K."""
    at, _ = state_tile(key, value, K, V, V_FIRST)
    exists = (keys_of(key, V_FIRST) < keys) & (values_of(value, V_FIRST) < V)
    return tl.load(states + place + at, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def _store(states, place, key, value, keys, matrix, K: tl.constexpr, V: tl.constexpr,
           V_FIRST: tl.constexpr):  # fmt: skip
    """Store a tile of the state at `place`; store nothing if `keys` is 0 instead of K."""
    at, _ = state_tile(key, value, K, V, V_FIRST)
    exists = (keys_of(key, V_FIRST) < keys) & (values_of(value, V_FIRST) < V)
    tl.store(states + place + at, matrix.to(states.dtype.element_ty), mask=exists)


@triton.jit
def _step(matrix, q, k, v, a, b, A_log, dt_bias, scale, token, q_t, k_t, v_t, a_t, b_t, head, key,
          value, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
          V_FIRST: tl.constexpr, NORMALIZE: tl.constexpr, softplus_beta, softplus_threshold,
          PLAIN: tl.constexpr):  # fmt: skip
    """Return the state after a token, and q's output.

    Without A_log, a and b are the gates g and beta.
    """
    qk_head = head // (HV // H)
    b_k = keys_of(_normalized(load_row(k + token * k_t, qk_head, key, K), NORMALIZE), V_FIRST)
    b_q = _normalized(load_row(q + token * q_t, qk_head, key, K), NORMALIZE) * scale
    # Broadcast gates to vectors, because the scalar unit has no exp.
    log = tl.zeros(key.shape, tl.float32) + tl.load(a + token * a_t + head).to(tl.float32)
    strength = tl.zeros(value.shape, tl.float32) + tl.load(b + token * b_t + head).to(tl.float32)
    if A_log is not None:
        rate = tl.zeros(key.shape, tl.float32) + tl.load(A_log + head).to(tl.float32)
        raw = log + tl.load(dt_bias + head).to(tl.float32)
        root, _, plus = rate_of(raw, rate, softplus_beta, softplus_threshold, PLAIN)
        log = 0.0 - root * plus * root
        strength = sigmoid(strength)
    matrix = matrix * keys_of(tl.exp(log), V_FIRST)
    error = load_row(v + token * v_t, head, value, V) - over_keys(matrix * b_k, V_FIRST)
    matrix += b_k * values_of(error * strength, V_FIRST)
    return matrix, over_keys(matrix * keys_of(b_q, V_FIRST), V_FIRST)


@triton.jit(do_not_specialize=["sequences", "length", "tokens", "slots", "rows", "steps"])
def _update_kernel(
    q, k, v, a, b, A_log, dt_bias, state, state_indices, cu_seqlens, num_accepted_tokens,
    intermediate_states, intermediate_state_indices, scale, softplus_beta, softplus_threshold, o,
    sequences, length, tokens, slots, rows, steps,
    q_t, k_t, v_t, a_t, b_t, state_n, index_n, index_t, kept_n, kept_t,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr,
    NORMALIZE: tl.constexpr, UPDATE: tl.constexpr, SLOT_PER_TOKEN: tl.constexpr,
    PLAIN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    """Loop over the tokens of each sequence; update its state and write its outputs.

    steps: maximum number of tokens of a sequence, if the state after each token is kept. A state
    that must not be read or written gets 0 keys, because a branch would end the pipelining of
    loads. With cu_seqlens, one more sequence stands for the tokens after the last sequence.
    """
    blocks: tl.constexpr = (V + BV - 1) // BV
    COUNTED: tl.constexpr = num_accepted_tokens is not None
    key = tl.arange(0, BK)
    walked, right, owned = sequences, True, tokens
    if cu_seqlens is not None:
        walked = sequences + 1
        right, owned = looked_at(cu_seqlens, sequences, tokens, STARTS)
    for item in range(tl.program_id(0), walked * HV * blocks, tl.num_programs(0)):
        n, head = item // (HV * blocks), item // blocks % HV
        value = item % blocks * BV + tl.arange(0, BV)
        here = tl.cast(head, tl.int64) * (K * V)
        begin, count = _span(cu_seqlens, n, sequences, length, tokens, right, owned)
        known = tl.cast(tl.minimum(n, sequences - 1), tl.int64)
        accepted = _accepted(num_accepted_tokens, known)
        slot, valid = _first_slot(state_indices, accepted, known, count, slots, steps, index_n,
                                  index_t, COUNTED, SLOT_PER_TOKEN)  # fmt: skip
        row, row_valid = _kept_row(intermediate_states, intermediate_state_indices, accepted, known,
                                   count, rows, steps)  # fmt: skip
        skipped = ((slot == -1) | (n >= sequences)) & right
        live = valid & row_valid & right & (n < sequences) & (count > 0)
        keys = tl.where(live, K, 0)
        place = tl.cast(slot, tl.int64) * state_n + here
        kept = tl.cast(row, tl.int64) * kept_n + here
        if (intermediate_states is not None) and COUNTED:
            last = kept + tl.cast(accepted - 1, tl.int64) * kept_t
            matrix = _load(state, place, key, value, tl.where(accepted > 0, 0, keys), K, V, V_FIRST)
            matrix += _load(intermediate_states, last, key, value, tl.where(accepted > 0, keys, 0),
                            K, V, V_FIRST)  # fmt: skip
        else:
            matrix = _load(state, place, key, value, keys, K, V, V_FIRST)
        for i in range(0, count):
            matrix, read = _step(matrix, q, k, v, a, b, A_log, dt_bias, scale, begin + i, q_t, k_t,
                                 v_t, a_t, b_t, head, key, value, H, HV, K, V, V_FIRST,
                                 NORMALIZE, softplus_beta, softplus_threshold,
                                 PLAIN)  # fmt: skip
            written = live
            if SLOT_PER_TOKEN:
                own = state_indices + known * index_n + tl.minimum(i, steps - 1) * index_t
                index = tl.load(own).to(tl.int32)
                written = live & (index >= -1) & (index < slots)
                if UPDATE:
                    _store(state, tl.cast(index, tl.int64) * state_n + here, key, value,
                           tl.where(written & (index >= 0), K, 0), matrix, K, V,
                           V_FIRST)  # fmt: skip
            if intermediate_states is not None:
                _store(intermediate_states, kept + tl.cast(i, tl.int64) * kept_t, key, value,
                       tl.where(row >= 0, keys, 0), matrix, K, V, V_FIRST)  # fmt: skip
            read = tl.where(written, read, tl.where(skipped, 0.0, float("nan")))
            to = o + ((begin + i) * HV + head) * V + value
            tl.store(to, read.to(o.dtype.element_ty), mask=value < V)
        if UPDATE and not SLOT_PER_TOKEN:
            _store(state, place, key, value, keys, matrix, K, V, V_FIRST)


@triton.jit
def _numbers(at, mask):
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _row(at, mask, ALL: tl.constexpr, NORMALIZE: tl.constexpr):
    """Load rows in fp32; return them, and 1 over their norms (1 without NORMALIZE)."""
    x = tl.load(at).to(tl.float32) if ALL else _numbers(at, mask)
    if NORMALIZE:
        return x, 1.0 / tl.sqrt(tl.sum(x * x, 1) + 1e-6)
    else:
        return x, tl.full((x.shape[0],), 1.0, tl.float32)


@triton.jit(do_not_specialize=["sequences", "slots", "parts"])
def _decode_kernel(
    q, k, v, a, b, A_log, dt_bias, state, new_state, state_indices, scale, softplus_beta,
    softplus_threshold, o, sequences, slots, parts, q_t, k_t, v_t, a_t, b_t, state_n, index_n,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, NORMALIZE: tl.constexpr,
    UPDATE: tl.constexpr, PLAIN: tl.constexpr, BH: tl.constexpr, BV: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Compute one token of each sequence and update its state, [slots, HV, V, K].

    A tile is [BH heads, BV values, BK keys]. A work item is a part of the values of BH heads, tile
    by tile. With several heads, numbers per head (gates, norms) are vectors. The compiler would
    compute a single number on the scalar unit, and the next tile's loads would wait for it. k and q
    are multiplied with the state before it decays: o = decay S q + (k q) change. new_state is the
    same tensor as state: with one name for both, the compiler would make each load wait for the
    previous store.
    """
    # Use no mask if none is needed: a mask takes as much memory as a tile.
    ALL: tl.constexpr = (HV % BH == 0) & (K == BK)
    across: tl.constexpr = (HV + BH - 1) // BH
    blocks: tl.constexpr = (V + BV - 1) // BV
    key = tl.arange(0, BK)
    each = (blocks + parts - 1) // parts
    for item in range(tl.program_id(0), sequences * across * parts, tl.num_programs(0)):
        n = tl.cast(item // (across * parts), tl.int64)
        head = item // parts % across * BH + tl.arange(0, BH)
        known = head < HV
        slot = tl.load(state_indices + n * index_n).to(tl.int32)
        live = (slot >= 0) & (slot < slots)
        there = head < tl.where(live, HV, 0)
        row = (head // (HV // H))[:, None] * K + key[None, :]
        rows = known[:, None] & (key < K)[None, :]
        b_k, over_k = _row(k + n * k_t + row, rows, ALL, NORMALIZE)
        b_q, over_q = _row(q + n * q_t + row, rows, ALL, NORMALIZE)
        raw = _numbers(a + n * a_t + head, known) + _numbers(dt_bias + head, known)
        rate = _numbers(A_log + head, known)
        root, _, plus = rate_of(raw, rate, softplus_beta, softplus_threshold, PLAIN)
        decay = tl.exp(0.0 - root * plus * root)
        strength = over_k / (1.0 + tl.exp(0.0 - _numbers(b + n * b_t + head, known)))
        over_q = over_q * scale
        recall, read, own = decay * over_k, decay * over_q, tl.sum(b_k * b_q, 1) * over_q
        for block in range(item % parts * each, tl.minimum(item % parts * each + each, blocks)):
            value = block * BV + tl.arange(0, BV)
            columns = known[:, None] & (value < V)[None, :]
            exists = there[:, None, None] & (value < V)[None, :, None] & (key < K)[None, None, :]
            place = head[:, None, None] * (K * V) + value[None, :, None] * K + key[None, None, :]
            place = tl.cast(slot, tl.int64) * state_n + place
            matrix = tl.load(state + place, mask=exists, other=0.0).to(tl.float32)
            column = head[:, None] * V + value[None, :]
            recalled = tl.sum(matrix * b_k[:, None, :], 2) * recall[:, None]
            change = (_numbers(v + n * v_t + column, columns) - recalled) * strength[:, None]
            out = tl.sum(matrix * b_q[:, None, :], 2) * read[:, None] + change * own[:, None]
            whose = there[:, None] & (value < V)[None, :]
            tl.store(o + n * (HV * V) + column, out.to(o.dtype.element_ty), mask=whose)
            if (slot < 0) | (slot >= slots):
                fill = tl.zeros((BH, BV), tl.float32) + tl.where(slot == -1, 0.0, float("nan"))
                tl.store(o + n * (HV * V) + column, fill.to(o.dtype.element_ty), mask=columns)
            if UPDATE:
                matrix = matrix * decay[:, None, None] + change[:, :, None] * b_k[:, None, :]
                tl.store(new_state + place, matrix.to(new_state.dtype.element_ty), mask=exists)


def gated_delta_rule_update(
    q, k, v, a, b, A_log, dt_bias, state, state_indices, cu_seqlens, num_accepted_tokens,
    intermediate_states, intermediate_state_indices, scale, normalize, state_v_first, update,
    softplus_beta, softplus_threshold, o,
):  # fmt: skip
    """Write o, and update the states in place. Arguments as in the operator."""
    tokens, heads, keys = q.shape
    value_heads, values = v.shape[1:]
    sequences = state_indices.shape[0]
    per_token = state_indices.dim() == 2
    kept = intermediate_states
    rows, steps = (0, state_indices.shape[-1]) if kept is None else kept.shape[:2]
    constants = tile_constants(keys, values, TILE)
    constants |= {
        "H": heads, "HV": value_heads, "K": keys, "V": values, "NORMALIZE": normalize,
        "UPDATE": update, "PLAIN": is_plain(softplus_beta, softplus_threshold),
    }  # fmt: skip
    strides = [x.stride(0) for x in (q, k, v, a, b, state, state_indices)]
    one_each = tokens == sequences and cu_seqlens is kept is None and not per_token
    if one_each and state_v_first and A_log is not None:
        constants |= _decode_tile(value_heads, keys, values)
        items = sequences * cdiv(value_heads, constants["BH"])
        parts = _parts(items, cdiv(values, constants["BV"]), vector_grid(1 << 16, q.device)[0])
        _decode_kernel[vector_grid(items * parts, q.device)](
            q, k, v, a, b, A_log, dt_bias, state, state, state_indices, scale, softplus_beta,
            softplus_threshold, o, sequences, state.shape[0], parts, *strides, **constants,
        )  # fmt: skip
        return
    walked = sequences + (cu_seqlens is not None)
    items = walked * value_heads * cdiv(values, constants["BV"])
    _update_kernel[vector_grid(items, q.device)](
        q, k, v, a, b, A_log, dt_bias, state, state_indices, int32_starts(cu_seqlens),
        num_accepted_tokens, kept, intermediate_state_indices, scale, softplus_beta,
        softplus_threshold, o, sequences, tokens // sequences, tokens, state.shape[0], rows, steps,
        *strides, state_indices.stride(1) if per_token else 0,
        *((0, 0) if kept is None else kept.stride()[:2]),
        V_FIRST=state_v_first, SLOT_PER_TOKEN=per_token, STARTS=STARTS, **constants,
    )  # fmt: skip


def _decode_tile(heads: int, keys: int, values: int) -> dict:
    """Return the shape of a tile of `_decode_kernel`."""
    wide, most = next_power_of_2(keys), min(DECODE_HEADS, next_power_of_2(heads))
    fits = max(1, DECODE_TILE // (most * wide))
    return {"BH": most, "BV": min(fits, next_power_of_2(values)), "BK": wide}


def _parts(items: int, blocks: int, cores: int) -> int:
    """Return the number of parts to cut the `blocks` tiles of each work item into.

    The norms and gates of an item take about as long as a tile, and each part computes them again.
    Few parts repeat them rarely; many keep all `cores` busy.
    """
    choices = (1 << n for n in range(blocks.bit_length()))
    return min(choices, key=lambda parts: cdiv(items * parts, cores) * (1 + cdiv(blocks, parts)))
