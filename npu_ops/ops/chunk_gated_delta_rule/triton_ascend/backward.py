"""Shared by chunk_gated_delta_rule and chunk_kda: computes gradients in Triton, in three steps.

The first step recomputes the states, the second computes their gradients from last to first, and
the third computes the gradients of all chunks at once.

Tokens write A R to the state. A (`solved`) is the inverse of the chunk's triangular matrix, and R =
beta (v - gamma k S), with gamma the decay since the chunk's start. So the gradient of the
triangular matrix is -(A^T grad_written) written^T: no step differentiates the inversion.

In products, rows of q and k are used as the caller passed them. The other factor is multiplied by
over_q and over_k, 1 over the norms of q and k.
"""

from __future__ import annotations

import triton
import triton.language as tl

from npu_ops.ops.chunk_gated_delta_rule.triton_ascend.forward import (
    columns_of,
    dot_in_two,
    load_decays,
    load_state,
    store_state,
    written_and_added,
    written_and_added_by_key,
)
from npu_ops.ops.chunk_gated_delta_rule.triton_ascend.intra import (
    decays,
    load_over_norms,
    load_rows,
    load_square,
    load_tile,
    store_rows,
)


@triton.jit
def store_product(x, product, one, first, rows, heads, head, D: tl.constexpr, BD: tl.constexpr,
                  C: tl.constexpr, column):  # fmt: skip
    """Store a product of the matrix unit that is also an operand of its next product. `one` is 1.

    The multiplication by 1 is work for the vector cores. Without any, the compiler would not divide
    the kernel's tiles between the two vector cores.
    """
    store_rows(x, product.to(tl.float32) * one, first, rows, heads, head, D, BD, C, column)


@triton.jit(do_not_specialize=["piece", "end", "one"])
def states_kernel(
    k, v, g_sums, betas, solved, over_k, initial_state, starts, firsts, states, written, kept,
    decays, one, piece, end,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write the state before each chunk, and the value that each token writes to it.

    states: [chunks, HV, K, V]. written: like v. kept, decays: as in `forward_kernel`.
    """
    row = tl.arange(0, C)
    wide = solved.dtype.element_ty
    for item in range(piece + tl.program_id(0), end, tl.num_programs(0)):
        n, head, column, value, begin, stop, chunk = columns_of(item, starts, firsts, HV, V, BV)
        state = load_state(initial_state, tl.cast(n * HV + head, tl.int64), value, K, V, BK, BV,
                           V_FIRST)  # fmt: skip
        for first in range(begin, stop, C):
            rows = stop - first
            index = tl.cast(chunk + (first - begin) // C, tl.int64)
            place = index * HV + head
            operand = state.to(wide)
            store_state(states, operand, place, value, K, V, BK, BV, False)
            b_beta = tl.load(betas + place * C + row)
            if decays is None:
                of_k = load_over_norms(over_k, index * H + head // (HV // H), C)
                b_g, last = tl.load(g_sums + place * C + row), tl.load(g_sums + place * C + C - 1)
                b_solved = load_square(solved, place, C).to(tl.float32) * b_beta[None, :]
                b_written, added = written_and_added(
                    operand, k, v, b_solved, b_g, last, of_k, first, rows, head, column, H, HV, K,
                    V, BK, BV, C,
                )  # fmt: skip
                decay = tl.exp(last)
            else:
                b_solved = load_square(solved, place, C).to(tl.float32) * b_beta[None, :]
                b_written, added = written_and_added_by_key(
                    operand, k, kept, v, b_solved, place, first, rows, head, column, HV, K, V, BK,
                    BV, C,
                )  # fmt: skip
                decay = load_decays(decays, place, K, BK)
            store_product(written, b_written, one, first, rows, HV, head, V, BV, C, column)
            state = state * decay + added


@triton.jit(do_not_specialize=["piece", "end", "scale", "number"])
def state_gradients_kernel(
    grad_o, grad_final_state, q, k, v, g_sums, betas, solved, scores, over_q, over_k, starts,
    firsts, grad_states, grad_wanted, grad_v, grad_betas, grad_initial_state, kept, decays, scale,
    number, piece, end, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    V_FIRST: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the states, from the last chunk of a sequence to the first.

    grad_states: gradient of the state after each chunk, [chunks, HV, K, V].
    grad_wanted: gradient of R (see the module's docstring), like v. grad_v: like v.
    grad_betas: the part of betas' gradient that comes through v, [blocks of values, chunks, HV, C].
    number: number of chunks.

    Gates multiply rows of A, grad_o and grad_wanted. Rows of q and k are as the caller passed them.
    kept, decays: as in `forward_kernel`; q and k then include the gates.
    """
    row = tl.arange(0, C)
    wide = solved.dtype.element_ty
    blocks: tl.constexpr = (V + BV - 1) // BV
    for item in range(piece + tl.program_id(0), end, tl.num_programs(0)):
        n, head, column, value, begin, stop, chunk = columns_of(item, starts, firsts, HV, V, BV)
        here = tl.cast(n * HV + head, tl.int64)
        grad_state = load_state(grad_final_state, here, value, K, V, BK, BV, V_FIRST)
        chunks = tl.cdiv(stop - begin, C)
        for back in range(0, chunks):
            index = chunks - 1 - back
            first = begin + index * C
            rows = stop - first
            place = tl.cast(chunk + index, tl.int64) * HV + head
            shared = tl.cast(chunk + index, tl.int64) * H + head // (HV // H)
            operand = grad_state.to(wide)
            store_state(grad_states, operand, place, value, K, V, BK, BV, False)
            b_beta = tl.load(betas + place * C + row)
            b_v = load_rows(v, first, rows, HV, head, V, BV, C, column).to(tl.float32)
            b_grad_o = load_rows(grad_o, first, rows, HV, head, V, BV, C, column).to(wide)
            b_solved = load_square(solved, place, C)
            b_scores = tl.trans(load_square(scores, place, C))
            if decays is None:
                of_q, of_k = load_over_norms(over_q, shared, C), load_over_norms(over_k, shared, C)
                b_g, last = tl.load(g_sums + place * C + row), tl.load(g_sums + place * C + C - 1)
                b_q = load_rows(q, first, rows, H, head // (HV // H), K, BK, C).to(wide)
                b_k = load_rows(k, first, rows, H, head // (HV // H), K, BK, C).to(wide)
                of_scores = tl.dot(b_scores, b_grad_o, input_precision="ieee").to(wide)
                of_state = tl.dot(b_k, operand, input_precision="ieee").to(wide)
                faded = b_solved.to(tl.float32) * (tl.exp(last - b_g) * of_k)[:, None]
                b_grad_wanted = tl.dot(tl.trans(b_solved), of_scores, input_precision="ieee")
                b_grad_wanted = dot_in_two(faded, of_state, b_grad_wanted, True)
                b_grad_v = b_grad_wanted * b_beta[:, None]
                gamma = tl.exp(b_g)
                asked = b_grad_o.to(tl.float32) * (gamma * of_q)[:, None] * scale
                recalled = (b_grad_v * (0.0 - gamma * of_k)[:, None]).to(wide)
                more = tl.dot(tl.trans(b_k), recalled, input_precision="ieee")
                more = dot_in_two(tl.trans(b_q), asked, more)
                decay = tl.exp(last)
            else:
                b_kept = load_tile(kept, place, C, K, BK)
                of_solved = tl.dot(b_scores, b_grad_o, input_precision="ieee")
                of_solved = tl.dot(b_kept, operand, of_solved, input_precision="ieee").to(wide)
                b_grad_wanted = tl.dot(tl.trans(b_solved), of_solved, input_precision="ieee")
                b_grad_v = b_grad_wanted * b_beta[:, None]
                recalled = (0.0 - b_grad_v).to(wide)
                b_k = load_tile(k, place, C, K, BK)
                more = tl.dot(tl.trans(b_k), recalled, input_precision="ieee")
                b_q = load_tile(q, place, C, K, BK)
                more = tl.dot(tl.trans(b_q), b_grad_o, more, input_precision="ieee")
                decay = load_decays(decays, place, K, BK)
            # Stores that the next iteration does not wait for come last.
            store_rows(grad_wanted, b_grad_wanted, first, rows, HV, head, V, BV, C, column)
            part = tl.cast(item % blocks, tl.int64) * number * HV + place
            tl.store(grad_betas + part * C + row, tl.sum(b_grad_wanted * b_v, 1))
            store_rows(grad_v, b_grad_v, first, rows, HV, head, V, BV, C, column)
            grad_state = grad_state * decay + more
        store_state(grad_initial_state, grad_state, here, value, K, V, BK, BV, V_FIRST)


@triton.jit(do_not_specialize=["number"])
def inner_products_kernel(
    states, grad_states, g_sums, totals, number, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, ROWS: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Write totals, fp32 [chunks, HV].

    A total is decay * sum(state before the chunk * gradient of the state after it), with the decay
    over the chunk.
    """
    value = tl.arange(0, BV)
    for item in range(tl.program_id(0), number * HV, tl.num_programs(0)):
        place = tl.cast(item, tl.int64)
        total = tl.zeros((BV,), tl.float32)
        for start in range(0, K, ROWS):
            key = start + tl.arange(0, ROWS)
            at = place * (K * V) + key[:, None] * V + value[None, :]
            mask = (key < K)[:, None] & (value < V)[None, :]
            state = tl.load(states + at, mask=mask, other=0.0).to(tl.float32)
            grad_state = tl.load(grad_states + at, mask=mask, other=0.0).to(tl.float32)
            total += tl.sum(state * grad_state, 0)
        decay = tl.exp(tl.load(g_sums + place * C + C - 1))
        tl.store(totals + place, tl.sum(total, 0) * decay)


@triton.jit
def load_keys(states, place, key, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
              BV: tl.constexpr):  # fmt: skip
    """Load rows `key` of a state, [BK, BV]."""
    value = tl.arange(0, BV)
    at = place * (K * V) + key[:, None] * V + value[None, :]
    if K % BK == 0 and BV == V:
        return tl.load(states + at)
    else:
        return tl.load(states + at, mask=(key < K)[:, None] & (value < V)[None, :], other=0.0)


@triton.jit
def norms_backward(grad, rows, over, WHOLE: tl.constexpr):
    """Return the gradient of rows [C, BK] of q or k; if not WHOLE, of the normalized rows.

    grad: the gradient of rows as if their norms were constants. over: 1 / norms, [C].
    WHOLE: BK covers all keys, so this function can add the gradient through the norms.
    """
    if WHOLE:
        rows = rows.to(tl.float32)
        along = tl.sum(grad * rows, 1) * over * over
        return grad - rows * along[:, None]
    else:
        return grad / over[:, None]


@triton.jit(do_not_specialize=["number", "scale"])
def gradients_kernel(
    grad_o, q, k, g_sums, betas, over_q, over_k, spans, states, written, grad_states, grad_wanted,
    grad_q, grad_k, grad_g_sums, kept_sums, grad_betas, scale, number, H: tl.constexpr,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Write all gradients of one chunk and BK keys of one head, summed over its value heads.

    Each block of keys contributes to the gradients of gates and betas, and writes its contribution
    separately: grad_g_sums, kept_sums and grad_betas are [blocks of keys, chunks, HV, C].

    No sum crosses rows, because the two vector cores divide a tile by rows. The sum of a column of
    scores is computed as k times its share of the gradient of k.

    With norms, sum_q and sum_k are gradients of q and k as if their norms were constants. If BK
    covers all keys, `norms_backward` adds the gradient through the norms. Else grad_q and grad_k
    get the gradients of q / norm and k / norm.
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
            b_grad_o = load_rows(grad_o, first, rows, HV, value_head, V, BV, C).to(wide)
            b_written = load_rows(written, first, rows, HV, value_head, V, BV, C)
            b_grad_wanted = load_rows(grad_wanted, first, rows, HV, value_head, V, BV, C)
            part = (tl.cast(block * number, tl.int64) * HV + place) * C + row

            # A token's score with itself depends on no gate. Exclude the diagonal from the sums
            # for the gates' gradient: there it would cancel only up to rounding.
            decay = tl.where(row[:, None] > row[None, :], decays(b_g, C), 0.0) * of_k[None, :]
            grad_qk = tl.dot(b_grad_o, tl.trans(b_written), input_precision="ieee") * scale
            own = tl.sum(tl.where(row[:, None] == row[None, :], grad_qk, 0.0), 1)
            own = (own * of_q * of_k)[:, None]
            grad_qk = (grad_qk * decay * of_q[:, None]).to(wide)
            grad_kk = tl.dot(b_grad_wanted, tl.trans(b_written), input_precision="ieee")
            grad_kk = (0.0 - grad_kk) * decay * of_k[:, None]
            kk = tl.dot(b_k, tl.trans(b_k), input_precision="ieee")
            b_grad_beta = tl.sum(grad_kk * kk, 1)
            # Round first. `within` uses the rounded values, and the gradient of the gates is a
            # difference of both sums, so both must use the same values.
            grad_kk = (grad_kk * b_beta[:, None]).to(wide)
            b_grad_g = 2.0 * tl.sum(grad_kk.to(tl.float32) * kk, 1)
            within = tl.dot(tl.trans(grad_qk), b_q, input_precision="ieee")
            within = tl.dot(grad_kk, b_k, within, input_precision="ieee")
            within = tl.dot(tl.trans(grad_kk), b_k, within, input_precision="ieee")
            wide_k, wide_q = b_k.to(tl.float32), b_q.to(tl.float32)
            b_grad_g -= tl.sum(within * wide_k, 1)
            sum_k += within + own * wide_q

            state = load_keys(states, place, key, K, V, BK, BV)
            asked = tl.dot(b_grad_o, tl.trans(state), input_precision="ieee")
            asked = asked * (tl.exp(b_g) * scale * of_q)[:, None]
            asked += tl.dot(grad_qk, b_k, input_precision="ieee")
            b_grad_g += tl.sum(asked * wide_q, 1)
            sum_q += asked + own * wide_k

            recalled = tl.dot(b_grad_wanted, tl.trans(state), input_precision="ieee")
            recalled = recalled * (tl.exp(b_g) * of_k)[:, None]
            of_row = tl.sum(recalled * wide_k, 1)
            b_grad_beta -= of_row
            b_grad_g -= of_row * b_beta
            sum_k -= recalled * b_beta[:, None]

            grad_state = load_keys(grad_states, place, key, K, V, BK, BV)
            kept = tl.dot(b_written, tl.trans(grad_state), input_precision="ieee")
            kept = kept * (tl.exp(last - b_g) * of_k)[:, None]
            tl.store(kept_sums + part, tl.sum(kept * wide_k, 1))
            sum_k += kept
            tl.store(grad_g_sums + part, b_grad_g)
            tl.store(grad_betas + part, b_grad_beta)
        if over_k is not None:
            sum_q = norms_backward(sum_q, b_q, of_q, blocks == 1)
            sum_k = norms_backward(sum_k, b_k, of_k, blocks == 1)
        store_rows(grad_q, sum_q, first, rows, H, head, K, BK, C, column)
        store_rows(grad_k, sum_k, first, rows, H, head, K, BK, C, column)
