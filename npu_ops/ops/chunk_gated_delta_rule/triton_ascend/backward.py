"""Gradients: the states once more, their gradients from the last chunk to the first, and then all
chunks at once.

With R = beta (v - gamma k S) and A the inverse, what is written is A R. So the gradient of what was
solved is simply -(A^T dwritten) written^T: nothing of the inverse has to be differentiated.

Rows of q and k are multiplied as they were given. Where 1 over their norms weighs on them, over_q
and over_k, it is multiplied with what multiplies them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from npu_ops.ops.chunk_gated_delta_rule.triton_ascend.forward import (
    dot_in_two,
    load_square,
    load_state,
    store_state,
)
from npu_ops.ops.chunk_gated_delta_rule.triton_ascend.intra import (
    decays,
    load_over_norms,
    load_rows,
    store_rows,
)


@triton.jit
def store_product(x, product, one, first, rows, heads, head, D: tl.constexpr, BD: tl.constexpr,
                  C: tl.constexpr, column):  # fmt: skip
    """Store what the matrix unit made and goes on to use. `one` is 1: where a vector core has
    nothing to do on a tile, the compiler does not share the kernel's tiles out among the two."""
    store_rows(x, product.to(tl.float32) * one, first, rows, heads, head, D, BD, C, column)


@triton.jit(do_not_specialize=["sequences", "one"])
def states_kernel(
    k, v, g_sums, betas, solved, over_k, initial_state, starts, firsts, states, written, one,
    sequences,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """states: the one before each chunk [chunks, HV, K, V]; written: what each token adds to it,
    like v."""
    row = tl.arange(0, C)
    wide = solved.dtype.element_ty
    blocks: tl.constexpr = (V + BV - 1) // BV
    for item in range(tl.program_id(0), sequences * HV * blocks, tl.num_programs(0)):
        n, head, column = item // (HV * blocks), item // blocks % HV, item % blocks * BV
        value = column + tl.arange(0, BV)
        state = load_state(initial_state, tl.cast(n * HV + head, tl.int64), value, K, V, BK, BV,
                           V_FIRST)  # fmt: skip
        begin, end = tl.load(starts + n), tl.load(starts + n + 1)
        chunk = tl.load(firsts + n)
        for first in range(begin, end, C):
            rows = end - first
            index = tl.cast(chunk + (first - begin) // C, tl.int64)
            place = index * HV + head
            of_k = load_over_norms(over_k, index * H + head // (HV // H), C)
            operand = state.to(wide)
            store_state(states, operand, place, value, K, V, BK, BV, False)
            b_g, b_beta = tl.load(g_sums + place * C + row), tl.load(betas + place * C + row)
            last = tl.load(g_sums + place * C + C - 1)
            b_k = load_rows(k, first, rows, H, head // (HV // H), K, BK, C).to(wide)
            b_v = load_rows(v, first, rows, HV, head, V, BV, C, column).to(tl.float32)
            recalled = tl.dot(b_k, operand, input_precision="ieee").to(wide).to(tl.float32)
            wanted = (b_v - (tl.exp(b_g) * of_k)[:, None] * recalled) * b_beta[:, None]
            b_written = dot_in_two(load_square(solved, place, C), wanted,
                                   tl.zeros((C, BV), tl.float32)).to(wide)  # fmt: skip
            store_product(written, b_written, one, first, rows, HV, head, V, BV, C, column)
            kept = b_k.to(tl.float32) * (tl.exp(last - b_g) * of_k)[:, None]
            added = dot_in_two(kept, b_written, tl.zeros((BK, BV), tl.float32), True)
            state = state * tl.exp(last) + added


@triton.jit(do_not_specialize=["sequences", "scale", "number"])
def state_gradients_kernel(
    do, dht, q, k, v, g_sums, betas, solved, scores, over_q, over_k, starts, firsts, dstates,
    dwanted, dv, dbetas, dh0, scale, number, sequences, H: tl.constexpr, HV: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """dstates: the gradient of the state after each chunk [chunks, HV, K, V]; dwanted: of what
    A is multiplied with, like v, as dv is; dbetas: what v adds to the gradient of betas, a part for
    each block of its columns [blocks, chunks, HV, C], of which there are `number`.

    Gates weigh on rows of A, do and dwanted, not on those of q and k, which are as they were given.
    """
    row = tl.arange(0, C)
    wide = solved.dtype.element_ty
    blocks: tl.constexpr = (V + BV - 1) // BV
    for item in range(tl.program_id(0), sequences * HV * blocks, tl.num_programs(0)):
        n, head, column = item // (HV * blocks), item // blocks % HV, item % blocks * BV
        value = column + tl.arange(0, BV)
        here = tl.cast(n * HV + head, tl.int64)
        dstate = load_state(dht, here, value, K, V, BK, BV, V_FIRST)
        begin, end = tl.load(starts + n), tl.load(starts + n + 1)
        chunks = tl.cdiv(end - begin, C)
        chunk = tl.load(firsts + n)
        for back in range(0, chunks):
            index = chunks - 1 - back
            first = begin + index * C
            rows = end - first
            place = tl.cast(chunk + index, tl.int64) * HV + head
            shared = tl.cast(chunk + index, tl.int64) * H + head // (HV // H)
            of_q, of_k = load_over_norms(over_q, shared, C), load_over_norms(over_k, shared, C)
            operand = dstate.to(wide)
            store_state(dstates, operand, place, value, K, V, BK, BV, False)
            b_g, b_beta = tl.load(g_sums + place * C + row), tl.load(betas + place * C + row)
            last = tl.load(g_sums + place * C + C - 1)
            b_q = load_rows(q, first, rows, H, head // (HV // H), K, BK, C).to(wide)
            b_k = load_rows(k, first, rows, H, head // (HV // H), K, BK, C).to(wide)
            b_v = load_rows(v, first, rows, HV, head, V, BV, C, column).to(tl.float32)
            b_do = load_rows(do, first, rows, HV, head, V, BV, C, column).to(wide)
            b_solved = load_square(solved, place, C)
            of_scores = tl.dot(tl.trans(load_square(scores, place, C)), b_do,
                               input_precision="ieee").to(wide)  # fmt: skip
            of_state = tl.dot(b_k, operand, input_precision="ieee").to(wide)
            faded = b_solved.to(tl.float32) * (tl.exp(last - b_g) * of_k)[:, None]
            b_dwanted = tl.dot(tl.trans(b_solved), of_scores, input_precision="ieee")
            b_dwanted = dot_in_two(faded, of_state, b_dwanted, True)
            store_rows(dwanted, b_dwanted, first, rows, HV, head, V, BV, C, column)
            part = tl.cast(item % blocks, tl.int64) * number * HV + place
            tl.store(dbetas + part * C + row, tl.sum(b_dwanted * b_v, 1))
            b_dv = b_dwanted * b_beta[:, None]
            store_rows(dv, b_dv, first, rows, HV, head, V, BV, C, column)
            gamma = tl.exp(b_g)
            asked = b_do.to(tl.float32) * (gamma * of_q)[:, None] * scale
            recalled = (b_dv * (0.0 - gamma * of_k)[:, None]).to(wide)
            more = tl.dot(tl.trans(b_k), recalled, input_precision="ieee")
            more = dot_in_two(tl.trans(b_q), asked, more)
            dstate = dstate * tl.exp(last) + more
        store_state(dh0, dstate, here, value, K, V, BK, BV, V_FIRST)


@triton.jit(do_not_specialize=["number"])
def inner_products_kernel(
    states, dstates, g_sums, totals, number, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, ROWS: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """totals: what a chunk's decay of the state as a whole weighs, fp32 [chunks, HV]."""
    value = tl.arange(0, BV)
    for item in range(tl.program_id(0), number * HV, tl.num_programs(0)):
        place = tl.cast(item, tl.int64)
        total = tl.zeros((BV,), tl.float32)
        for start in range(0, K, ROWS):
            key = start + tl.arange(0, ROWS)
            at = place * (K * V) + key[:, None] * V + value[None, :]
            mask = (key < K)[:, None] & (value < V)[None, :]
            state = tl.load(states + at, mask=mask, other=0.0).to(tl.float32)
            dstate = tl.load(dstates + at, mask=mask, other=0.0).to(tl.float32)
            total += tl.sum(state * dstate, 0)
        decay = tl.exp(tl.load(g_sums + place * C + C - 1))
        tl.store(totals + place, tl.sum(total, 0) * decay)


@triton.jit
def load_keys(states, place, key, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
              BV: tl.constexpr):  # fmt: skip
    """Rows `key` of a state, [BK, BV]."""
    value = tl.arange(0, BV)
    at = place * (K * V) + key[:, None] * V + value[None, :]
    if K % BK == 0 and BV == V:
        return tl.load(states + at)
    else:
        return tl.load(states + at, mask=(key < K)[:, None] & (value < V)[None, :], other=0.0)


@triton.jit
def norms_backward(slope, rows, over, WHOLE: tl.constexpr):
    """slope: the gradient of rows [C, BK] as if their norms were constants, `over` 1 over those.
    The gradient of rows where they are WHOLE, else of rows over their norms."""
    if WHOLE:
        rows = rows.to(tl.float32)
        along = tl.sum(slope * rows, 1) * over * over
        return slope - rows * along[:, None]
    else:
        return slope / over[:, None]


@triton.jit(do_not_specialize=["number", "scale"])
def gradients_kernel(
    do, q, k, g_sums, betas, over_q, over_k, spans, states, written, dstates, dwanted, dq, dk,
    dg_sums, kept_sums, dbetas, scale, number, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Everything of one chunk and BK keys of one head, summed over its value heads.

    What those keys add to the gradients of gates and betas goes to a part of its own: dg_sums,
    kept_sums and dbetas are [blocks of keys, chunks, HV, C].
    No sum crosses rows, for the two vector cores share a tile out by rows: a column of scores sums
    up to k times the gradient of k by them.
    With norms, sums are of the gradients of q and k as if their norms were constants. That norms
    are not is found where BK is all keys. Else dq and dk are the gradients of q and k over their
    norms.
    """
    row = tl.arange(0, C)
    wide = states.dtype.element_ty
    blocks: tl.constexpr = (K + BK - 1) // BK
    for item in range(tl.program_id(0), number * H * blocks, tl.num_programs(0)):
        chunk, head, block = item // (H * blocks), item // blocks % H, item % blocks
        first, rows = tl.load(spans + 2 * chunk), tl.load(spans + 2 * chunk + 1)
        column = block * BK
        key = column + tl.arange(0, BK)
        b_q = load_rows(q, first, rows, H, head, K, BK, C, column).to(wide)
        b_k = load_rows(k, first, rows, H, head, K, BK, C, column).to(wide)
        shared = tl.cast(chunk * H + head, tl.int64)
        of_q, of_k = load_over_norms(over_q, shared, C), load_over_norms(over_k, shared, C)
        sum_q, sum_k = tl.zeros((C, BK), tl.float32), tl.zeros((C, BK), tl.float32)
        for value_head in range(head * (HV // H), (head + 1) * (HV // H)):
            place = tl.cast(chunk * HV + value_head, tl.int64)
            b_g, b_beta = tl.load(g_sums + place * C + row), tl.load(betas + place * C + row)
            last = tl.load(g_sums + place * C + C - 1)
            b_do = load_rows(do, first, rows, HV, value_head, V, BV, C).to(wide)
            b_written = load_rows(written, first, rows, HV, value_head, V, BV, C)
            b_dwanted = load_rows(dwanted, first, rows, HV, value_head, V, BV, C)
            part = (tl.cast(block * number, tl.int64) * HV + place) * C + row

            # A token's own score weighs on no gate: what it is worth is kept out of their sums, in
            # which it would have to cancel.
            decay = tl.where(row[:, None] > row[None, :], decays(b_g, C), 0.0) * of_k[None, :]
            d_qk = tl.dot(b_do, tl.trans(b_written), input_precision="ieee") * scale
            own = tl.sum(tl.where(row[:, None] == row[None, :], d_qk, 0.0), 1)
            own = (own * of_q * of_k)[:, None]
            d_qk = (d_qk * decay * of_q[:, None]).to(wide)
            d_kk = tl.dot(b_dwanted, tl.trans(b_written), input_precision="ieee")
            d_kk = (0.0 - d_kk) * decay * of_k[:, None]
            kk = tl.dot(b_k, tl.trans(b_k), input_precision="ieee")
            d_beta = tl.sum(d_kk * kk, 1)
            # Rounded first, for `within` has it rounded, and the gates' sums are their difference.
            d_kk = (d_kk * b_beta[:, None]).to(wide)
            d_g = 2.0 * tl.sum(d_kk.to(tl.float32) * kk, 1)
            within = tl.dot(tl.trans(d_qk), b_q, input_precision="ieee")
            within = tl.dot(d_kk, b_k, within, input_precision="ieee")
            within = tl.dot(tl.trans(d_kk), b_k, within, input_precision="ieee")
            wide_k, wide_q = b_k.to(tl.float32), b_q.to(tl.float32)
            d_g -= tl.sum(within * wide_k, 1)
            sum_k += within + own * wide_q

            state = load_keys(states, place, key, K, V, BK, BV)
            asked = tl.dot(b_do, tl.trans(state), input_precision="ieee")
            asked = asked * (tl.exp(b_g) * scale * of_q)[:, None]
            asked += tl.dot(d_qk, b_k, input_precision="ieee")
            d_g += tl.sum(asked * wide_q, 1)
            sum_q += asked + own * wide_k

            recalled = tl.dot(b_dwanted, tl.trans(state), input_precision="ieee")
            recalled = recalled * (tl.exp(b_g) * of_k)[:, None]
            of_row = tl.sum(recalled * wide_k, 1)
            d_beta -= of_row
            d_g -= of_row * b_beta
            sum_k -= recalled * b_beta[:, None]

            dstate = load_keys(dstates, place, key, K, V, BK, BV)
            kept = tl.dot(b_written, tl.trans(dstate), input_precision="ieee")
            kept = kept * (tl.exp(last - b_g) * of_k)[:, None]
            tl.store(kept_sums + part, tl.sum(kept * wide_k, 1))
            sum_k += kept
            tl.store(dg_sums + part, d_g)
            tl.store(dbetas + part, d_beta)
        if over_k is not None:
            sum_q = norms_backward(sum_q, b_q, of_q, blocks == 1)
            sum_k = norms_backward(sum_k, b_k, of_k, blocks == 1)
        store_rows(dq, sum_q, first, rows, H, head, K, BK, C, column)
        store_rows(dk, sum_k, first, rows, H, head, K, BK, C, column)
