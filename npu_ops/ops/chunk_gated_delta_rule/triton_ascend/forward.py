"""Shared by chunk_gated_delta_rule and chunk_kda: loops over a sequence's chunks in Triton.

Each chunk updates the state, and its tokens read from it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from npu_ops.ops.chunk_gated_delta_rule.triton_ascend.intra import (
    load_over_norms,
    load_rows,
    load_square,
    load_tile,
    store_rows,
)


@triton.jit
def state_place(value, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
                V_FIRST: tl.constexpr):  # fmt: skip
    """Return the offsets of columns `value` in a stored state, and the mask of existing elements.

    Both are [BK, BV], or [BV, BK] with V_FIRST.
    """
    key = tl.arange(0, BK)
    if V_FIRST:
        return value[:, None] * K + key[None, :], (value < V)[:, None] & (key < K)[None, :]
    else:
        return key[:, None] * V + value[None, :], (key < K)[:, None] & (value < V)[None, :]


@triton.jit
def load_columns(states, place, value, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
                 BV: tl.constexpr, V_FIRST: tl.constexpr):  # fmt: skip
    """Load columns of a state, [BK, BV], 0 beyond it."""
    at, exists = state_place(value, K, V, BK, V_FIRST)
    if BK == K and V % BV == 0:  # avoid an unneeded mask: a mask takes as much memory as a tile
        state = tl.load(states + place * (K * V) + at)
    else:
        state = tl.load(states + place * (K * V) + at, mask=exists, other=0.0)
    if V_FIRST:
        state = tl.trans(state)
    return state


@triton.jit
def load_state(states, place, value, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
               BV: tl.constexpr, V_FIRST: tl.constexpr):  # fmt: skip
    """Load columns of an fp32 state; 0 if there are no states."""
    if states is None:
        return tl.zeros((BK, BV), tl.float32)
    else:
        return load_columns(states, place, value, K, V, BK, BV, V_FIRST)


@triton.jit
def store_state(states, state, place, value, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
                BV: tl.constexpr, V_FIRST: tl.constexpr):  # fmt: skip
    """Store columns of a state: the inverse of `load_state`."""
    if states is not None:
        at, exists = state_place(value, K, V, BK, V_FIRST)
        if V_FIRST:
            state = tl.trans(state)
        state = state.to(states.dtype.element_ty)
        if BK == K and V % BV == 0:
            tl.store(states + place * (K * V) + at, state)
        else:
            tl.store(states + place * (K * V) + at, state, mask=exists)


@triton.jit
def dot_in_two(x, y, product, TURNED: tl.constexpr = False):
    """Return product + x y, or product + x^T y if TURNED. One of x and y may be fp32.

    If only one is fp32, it is split into a sum of two matrices of the other's dtype: the rounded
    matrix and the rest. So its rounding error is not lost. With TURNED, y must not be the only fp32
    matrix.
    """
    if x.dtype == y.dtype:
        return tl.dot(tl.trans(x) if TURNED else x, y, product, input_precision="ieee")
    elif y.dtype == tl.float32:
        rounded = y.to(x.dtype)
        left = (y - rounded.to(tl.float32)).to(x.dtype)
        product = tl.dot(x, rounded, product, input_precision="ieee")
        return tl.dot(x, left, product, input_precision="ieee")
    else:
        rounded = x.to(y.dtype)
        left = (x - rounded.to(tl.float32)).to(y.dtype)
        product = tl.dot(tl.trans(rounded) if TURNED else rounded, y, product,
                         input_precision="ieee")  # fmt: skip
        return tl.dot(tl.trans(left) if TURNED else left, y, product, input_precision="ieee")


@triton.jit
def written_to(state, solved, k, v, decay_k, C: tl.constexpr, BV: tl.constexpr):
    """Return what a chunk's tokens write to a state, in k's dtype: solved (v - decay_k k S).

    state: in the dtype of k and v. solved: may be fp32. decay_k: None if k includes it.
    k S stays in the matrix unit, because decay_k is multiplied into `solved` instead.
    """
    if decay_k is None:
        forgets = (0.0 - solved.to(tl.float32)).to(solved.dtype)
    else:
        forgets = solved.to(tl.float32) * (0.0 - decay_k)[None, :]
    recalled = tl.dot(k, state, input_precision="ieee").to(k.dtype)
    written = dot_in_two(solved, v, tl.zeros((C, BV), tl.float32))
    return dot_in_two(forgets, recalled, written).to(k.dtype)


@triton.jit
def columns_of(item, starts, firsts, HV: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """Decode the index of a work item: BV columns of one head's state in one sequence.

    Returns:
        The sequence, the head, the first column, the vector of BV columns, the sequence's first
        token, the token after its last, and the index of its first chunk.
    """
    blocks: tl.constexpr = (V + BV - 1) // BV
    n, head, column = item // (HV * blocks), item // blocks % HV, item % blocks * BV
    begin, stop, chunk = tl.load(starts + n), tl.load(starts + n + 1), tl.load(firsts + n)
    return n, head, column, column + tl.arange(0, BV), begin, stop, chunk


@triton.jit
def written_and_added(
    operand, k, v, solved, b_g, last, of_k, first, rows, head, column, H: tl.constexpr,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Return the values that a chunk's tokens write, and the sum of what they add to the state.

    A token adds its key times its value, decayed from the token to the chunk's end.

    Args:
        operand: the state before the chunk, in the dtype of matrix products.
        solved: the inverse of the chunk's triangular matrix, times beta.
    """
    b_k = load_rows(k, first, rows, H, head // (HV // H), K, BK, C).to(operand.dtype)
    b_v = load_rows(v, first, rows, HV, head, V, BV, C, column).to(operand.dtype)
    written = written_to(operand, solved, b_k, b_v, tl.exp(b_g) * of_k, C, BV)
    kept = b_k.to(tl.float32) * (tl.exp(last - b_g) * of_k)[:, None]
    return written, dot_in_two(kept, written, tl.zeros((BK, BV), tl.float32), True)


@triton.jit
def written_and_added_by_key(
    operand, recalled, kept, v, solved, place, first, rows, head, column, HV: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Compute the same as `written_and_added`, for rules in which each key has its own decay.

    recalled, kept: k times the decays from the chunk's start to a token, and k times the decays
    from the token to the chunk's end; [chunks, HV, C, K].
    """
    b_v = load_rows(v, first, rows, HV, head, V, BV, C, column).to(operand.dtype)
    written = written_to(operand, solved, load_tile(recalled, place, C, K, BK), b_v, None, C, BV)
    b_kept = load_tile(kept, place, C, K, BK)
    return written, dot_in_two(b_kept, written, tl.zeros((BK, BV), tl.float32), True)


@triton.jit
def load_decays(decays, place, K: tl.constexpr, BK: tl.constexpr):
    """Load the decays of a state's keys over a chunk, [BK, 1], from fp32 [chunks, HV, K]."""
    key = tl.arange(0, BK)
    return tl.load(decays + place * K + key, mask=key < K, other=0.0)[:, None]


@triton.jit(do_not_specialize=["piece", "end", "scale"])
def forward_kernel(
    q, k, v, g_sums, solved, scores, over_q, over_k, initial_state, starts, firsts, o, final_state,
    chunk_states, states_firsts, kept, decays, scale, piece, end, KEEP: tl.constexpr,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Update BV columns of one head's state chunk by chunk, and write the outputs of the tokens.

    The state is fp32. Operands of matrix products have the dtype of `solved`, whose columns are
    already multiplied by betas. q, k and v are as the caller passed them: over_q and over_k, 1 over
    the norms of q and k, are multiplied into the other factor. chunk_states, unless it is None,
    gets the state before every KEEP tokens; its rows of sequence n begin at states_firsts[n].

    kept, decays: None, unless each key has its own decay. Then q, k and kept are the outputs asked,
    recalled and kept of chunk_kda's `pairs_kernel`. decays, [chunks, HV, K], has the decay of each
    key over a chunk.
    """
    row = tl.arange(0, C)
    wide = solved.dtype.element_ty
    for item in range(piece + tl.program_id(0), end, tl.num_programs(0)):
        n, head, column, value, begin, stop, chunk = columns_of(item, starts, firsts, HV, V, BV)
        here = tl.cast(n * HV + head, tl.int64)
        state = load_state(initial_state, here, value, K, V, BK, BV, V_FIRST)
        for first in range(begin, stop, C):
            rows = stop - first
            index = tl.cast(chunk + (first - begin) // C, tl.int64)
            if chunk_states is not None:
                before = tl.load(states_firsts + n) + (first - begin) // KEEP
                if KEEP == C or (first - begin) % KEEP == 0:
                    store_state(chunk_states, state, tl.cast(before, tl.int64) * HV + head, value,
                                K, V, BK, BV, V_FIRST)  # fmt: skip
            place, shared = index * HV + head, index * H + head // (HV // H)
            operand = state.to(wide)
            b_solved = load_square(solved, place, C)
            if decays is None:
                b_g, last = tl.load(g_sums + place * C + row), tl.load(g_sums + place * C + C - 1)
                gamma = tl.exp(b_g)
                of_q, of_k = load_over_norms(over_q, shared, C), load_over_norms(over_k, shared, C)
                b_q = load_rows(q, first, rows, H, head // (HV // H), K, BK, C).to(wide)
                written, added = written_and_added(
                    operand, k, v, b_solved, b_g, last, of_k, first, rows, head, column, H, HV, K,
                    V, BK, BV, C,
                )  # fmt: skip
                # The next chunk does not wait for the outputs, so they are computed last.
                asked = (b_q.to(tl.float32) * (gamma * scale * of_q)[:, None]).to(wide)
                decay = tl.exp(last)
            else:
                written, added = written_and_added_by_key(
                    operand, k, kept, v, b_solved, place, first, rows, head, column, HV, K, V, BK,
                    BV, C,
                )  # fmt: skip
                asked = load_tile(q, place, C, K, BK)
                decay = load_decays(decays, place, K, BK)
            read = tl.dot(asked, operand, input_precision="ieee")
            read = tl.dot(load_square(scores, place, C), written, read, input_precision="ieee")
            store_rows(o, read, first, rows, HV, head, V, BV, C, column)
            state = state * decay + added
        store_state(final_state, state, here, value, K, V, BK, BV, V_FIRST)
