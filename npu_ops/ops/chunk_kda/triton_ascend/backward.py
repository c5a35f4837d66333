"""Computes gradients of Kimi Delta Attention for all chunks at once.

The kernels of `chunk_gated_delta_rule` compute the states and their gradients, chunk after chunk.

G are the cumulative sums of the log decays. The gradient of G_i has three parts: q_i times the
gradient of q_i; plus k_i times its gradient as a row; minus k_i times its gradient as a column. k_i
is a row where token i recalls from the state or from earlier tokens, and a column where later
tokens use it.

A pair of tokens adds a number to one row and subtracts it from another. In the gradient of g the
two numbers cancel, exactly only if both are products of the same rounded factors. So the kernel
rounds factors first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from npu_ops.ops.chunk_gated_delta_rule.triton_ascend.backward import load_keys, norms_backward
from npu_ops.ops.chunk_gated_delta_rule.triton_ascend.intra import (
    load_over_norms,
    load_rows,
    load_square,
    store_rows,
)
from npu_ops.ops.chunk_kda.triton_ascend.intra import LOWEST, level_of


@triton.jit(do_not_specialize=["number"])
def inner_products_kernel(
    states, grad_states, decays, totals, number, HV: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Write totals, fp32 [chunks, HV, K].

    For each key: its decay over the chunk, times the sum over values of the state before the chunk
    times the gradient of the state after it.
    """
    blocks: tl.constexpr = (K + BK - 1) // BK
    for item in range(tl.program_id(0), number * HV * blocks, tl.num_programs(0)):
        place, key = tl.cast(item // blocks, tl.int64), item % blocks * BK + tl.arange(0, BK)
        state = load_keys(states, place, key, K, V, BK, BV).to(tl.float32)
        grad_state = load_keys(grad_states, place, key, K, V, BK, BV).to(tl.float32)
        decay = tl.load(decays + place * K + key, mask=key < K, other=0.0)
        total = tl.sum(state * grad_state, 1) * decay
        tl.store(totals + place * K + key, total, mask=key < K)


@triton.jit(do_not_specialize=["number", "scale"])
def gradients_kernel(
    grad_o, q, k, g, betas, kk, over_q, over_k, spans, states, written, grad_states, grad_wanted,
    totals, grad_q, grad_k, grad_g, grad_betas, scale, number, H: tl.constexpr, HV: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """Write all gradients of one chunk and BK keys of one head, summed over its value heads.

    grad_betas: the contribution of each block of keys, [blocks of keys, chunks, HV, C]. grad_g:
    fp32, like g. With norms, if BK does not cover all keys, grad_q and grad_k get the gradients of
    q / norm and k / norm.
    """
    row = tl.arange(0, C)
    wide = states.dtype.element_ty
    up_to = tl.where(row[:, None] >= row[None, :], 1.0, 0.0)
    from_here = tl.where(row[:, None] <= row[None, :], 1.0, 0.0)
    blocks: tl.constexpr = (K + BK - 1) // BK
    for item in range(tl.program_id(0), number * H * blocks, tl.num_programs(0)):
        chunk, head, block = item // (H * blocks), item // blocks % H, item % blocks
        first, rows = tl.load(spans + 2 * chunk), tl.load(spans + 2 * chunk + 1)
        column = block * BK
        key = column + tl.arange(0, BK)
        shared = tl.cast(chunk * H + head, tl.int64)
        of_q, of_k = load_over_norms(over_q, shared, C), load_over_norms(over_k, shared, C)
        b_q = load_rows(q, first, rows, H, head, K, BK, C, column).to(tl.float32)
        b_q = b_q * (of_q * scale)[:, None]
        b_k = load_rows(k, first, rows, H, head, K, BK, C, column).to(tl.float32)
        b_k = b_k * of_k[:, None]
        sum_q, sum_k = tl.zeros((C, BK), tl.float32), tl.zeros((C, BK), tl.float32)
        for value_head in range(head * (HV // H), (head + 1) * (HV // H)):
            place = tl.cast(chunk * HV + value_head, tl.int64)
            b_beta = tl.load(betas + place * C + row)
            b_g = load_rows(g, first, rows, HV, value_head, K, BK, C, column)
            b_g = tl.maximum(b_g, LOWEST)
            b_grad_o = load_rows(grad_o, first, rows, HV, value_head, V, BV, C).to(wide)
            b_written = load_rows(written, first, rows, HV, value_head, V, BV, C)
            b_grad_wanted = load_rows(grad_wanted, first, rows, HV, value_head, V, BV, C)

            # Gradients of q and k through their products with the state before the chunk.
            state = load_keys(states, place, key, K, V, BK, BV)
            since = tl.exp(tl.dot(up_to, b_g, input_precision="ieee"))
            asked = tl.dot(b_grad_o, tl.trans(state), input_precision="ieee") * since
            recalled = tl.dot(b_grad_wanted, tl.trans(state), input_precision="ieee") * since
            b_grad_beta = 0.0 - tl.sum(recalled * b_k, 1)
            recalled = recalled * (0.0 - b_beta)[:, None]
            sums = b_q * asked + b_k * recalled
            # Gradient of k through the chunk's writes to the state.
            grad_state = load_keys(grad_states, place, key, K, V, BK, BV)
            until = tl.exp(tl.dot(1.0 - up_to, b_g, input_precision="ieee"))
            kept = tl.dot(b_written, tl.trans(grad_state), input_precision="ieee") * until
            later = b_k * kept

            grad_qk = tl.dot(b_grad_o, tl.trans(b_written), input_precision="ieee")
            # A token's score with itself depends on no gate.
            own = tl.sum(tl.where(row[:, None] == row[None, :], grad_qk, 0.0), 1)[:, None]
            sum_q += asked + own * b_k
            sum_k += recalled + kept + own * b_q
            grad_kk = 0.0 - tl.dot(b_grad_wanted, tl.trans(b_written), input_precision="ieee")
            of_first = tl.where(block == 0, 1.0, 0.0)
            b_grad_beta += tl.sum(grad_kk * load_square(kk, place, C), 1) * of_first
            part = (tl.cast(block * number, tl.int64) * HV + place) * C + row
            tl.store(grad_betas + part, b_grad_beta)
            grad_kk = grad_kk * b_beta[:, None]
            half = 1.0
            for _ in range(0, LEVELS):
                between, pairs = level_of(half, C)
                decay = tl.exp(tl.dot(between, b_g, input_precision="ieee"))
                of_row, of_column = (b_q * decay).to(wide), (b_k * decay).to(wide)
                by_q, by_k = (grad_qk * pairs).to(wide), (grad_kk * pairs).to(wide)
                more_q = tl.dot(by_q, of_column, input_precision="ieee")
                row_k = tl.dot(by_k, of_column, input_precision="ieee")
                column_k = tl.dot(tl.trans(by_k), of_column, input_precision="ieee")
                column_k = tl.dot(tl.trans(by_q), of_row, column_k, input_precision="ieee")
                sums += of_row.to(tl.float32) * more_q
                sums += of_column.to(tl.float32) * (row_k - column_k)
                sum_q += decay * more_q
                sum_k += decay * (row_k + column_k)
                half = half * 2.0
            b_grad_g = tl.dot(from_here, sums, input_precision="ieee")
            b_grad_g = tl.dot(1.0 - from_here, later, b_grad_g, input_precision="ieee")
            total = tl.load(totals + place * K + key, mask=key < K, other=0.0)
            b_grad_g = b_grad_g + total[None, :]
            store_rows(grad_g, b_grad_g, first, rows, HV, value_head, K, BK, C, column)
        sum_q, sum_k = sum_q * (of_q * scale)[:, None], sum_k * of_k[:, None]
        if over_k is not None:
            raw_q = load_rows(q, first, rows, H, head, K, BK, C, column)
            raw_k = load_rows(k, first, rows, H, head, K, BK, C, column)
            sum_q = norms_backward(sum_q, raw_q, of_q, blocks == 1)
            sum_k = norms_backward(sum_k, raw_k, of_k, blocks == 1)
        store_rows(grad_q, sum_q, first, rows, H, head, K, BK, C, column)
        store_rows(grad_k, sum_k, first, rows, H, head, K, BK, C, column)
