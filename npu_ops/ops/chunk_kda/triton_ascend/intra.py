"""Compute how tokens of one chunk act on each other, with a decay for each key.

This part does not depend on the states. G are the cumulative sums of the log decays. exp(G_i - G_j)
is the product of two decays, split at a row r with j < r <= i. Pairs are computed by levels, as in
cpu.py. The exponents of a level are sums of g over some tokens. They are computed as a matrix of
zeros and ones times g, because differences of sums would lose precision.
"""

from __future__ import annotations

import triton
import triton.language as tl

from npu_ops.ops.chunk_gated_delta_rule.triton_ascend.intra import (
    load_rows,
    over_norms,
    store_square,
    store_tile,
)

# Lower bound of g; its decay is 0. With -inf, products with the zeros of a matrix would be NaN.
LOWEST = tl.constexpr(-1e4)


@triton.jit
def level_of(half, C: tl.constexpr):
    """Return the masks of one level: pairs (i, j) of a block of 2 * half tokens.

    Token i is in the second half of the block, j in the first half. half: fp32, a power of 2.

    Returns two fp32 [C, C] of zeros and ones: for each token (row), the tokens whose log decays lie
    between it and the first row of its block's second half; and the pairs that belong to the level.
    """
    token = tl.arange(0, C).to(tl.float32)
    middle = tl.floor(token / (2.0 * half)) * (2.0 * half) + half
    low, high = tl.minimum(token, middle), tl.maximum(token, middle)
    between = tl.where(token[None, :] > low[:, None], 1.0, 0.0)
    between = tl.where(token[None, :] > high[:, None], 0.0, between)
    pairs = tl.where(middle[:, None] == middle[None, :], 1.0, 0.0)
    second, is_first = tl.where(token >= middle, 1.0, 0.0), tl.where(token < middle, 1.0, 0.0)
    return between, pairs * second[:, None] * is_first[None, :]


@triton.jit(do_not_specialize=["number"])
def totals_kernel(g, spans, decays, number, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
                  C: tl.constexpr):  # fmt: skip
    """Write decays, fp32 [chunks, HV, K]: the decay of a state's keys over each chunk."""
    blocks: tl.constexpr = (K + BK - 1) // BK
    for item in range(tl.program_id(0), number * HV * blocks, tl.num_programs(0)):
        chunk, head, column = item // (HV * blocks), item // blocks % HV, item % blocks * BK
        first, rows = tl.load(spans + 2 * chunk), tl.load(spans + 2 * chunk + 1)
        b_g = load_rows(g, first, rows, HV, head, K, BK, C, column)
        total = tl.sum(tl.maximum(b_g, LOWEST), 0)
        key = column + tl.arange(0, BK)
        at = tl.cast(chunk * HV + head, tl.int64) * K + key
        tl.store(decays + at, tl.exp(total), mask=key < K)


@triton.jit(do_not_specialize=["number", "scale"])
def pairs_kernel(
    q, k, g, spans, qk, kk, asked, recalled, kept, over_q, over_k, scale, number, eps,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """Write everything of one chunk and value head that needs decays by key.

    qk, kk: sums over the keys of q_i k_j and k_i k_j times the decay from j to i, where j < i; qk
        also where j = i. fp32 [chunks, HV, C, C], 0 above the diagonal. q is scaled.
    asked, recalled: q and k times the decays from the chunk's start to a token; kept: k times the
        decays from the token to the chunk's end. [chunks, HV, C, K], 0 in rows beyond the chunk.
    over_q, over_k: None, or outputs [chunks, H, C]: 1 over the norms of q and k, also applied here.
    """
    row = tl.arange(0, C)
    wide = asked.dtype.element_ty
    up_to = tl.where(row[:, None] >= row[None, :], 1.0, 0.0)
    for item in range(tl.program_id(0), number * HV, tl.num_programs(0)):
        chunk, head = item // HV, item % HV
        shared = head // (HV // H)
        place = tl.cast(item, tl.int64)
        first, rows = tl.load(spans + 2 * chunk), tl.load(spans + 2 * chunk + 1)
        of_q, of_k = tl.full((C,), 1.0, tl.float32), tl.full((C,), 1.0, tl.float32)
        if over_k is not None:
            of_q = over_norms(q, first, rows, H, shared, eps, K, C)
            of_k = over_norms(k, first, rows, H, shared, eps, K, C)
            here = tl.cast(chunk * H + shared, tl.int64) * C + row
            tl.store(over_q + here, of_q)
            tl.store(over_k + here, of_k)
        b_qk, b_kk = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
        for column in range(0, K, BK):
            b_q = load_rows(q, first, rows, H, shared, K, BK, C, column).to(tl.float32)
            b_q = b_q * (of_q * scale)[:, None]
            b_k = load_rows(k, first, rows, H, shared, K, BK, C, column).to(tl.float32)
            b_k = b_k * of_k[:, None]
            b_g = tl.maximum(load_rows(g, first, rows, HV, head, K, BK, C, column), LOWEST)
            since = tl.exp(tl.dot(up_to, b_g, input_precision="ieee"))
            store_tile(asked, b_q * since, place, C, K, BK, column)
            store_tile(recalled, b_k * since, place, C, K, BK, column)
            until = tl.exp(tl.dot(1.0 - up_to, b_g, input_precision="ieee"))
            store_tile(kept, b_k * until, place, C, K, BK, column)
            own = tl.dot(b_q.to(wide), tl.trans(b_k.to(wide)), input_precision="ieee")
            b_qk += tl.where(row[:, None] == row[None, :], own, 0.0)
            half = 1.0
            for _ in range(0, LEVELS):
                between, pairs = level_of(half, C)
                decay = tl.exp(tl.dot(between, b_g, input_precision="ieee"))
                of_row, of_column = (b_q * decay).to(wide), (b_k * decay).to(wide)
                b_qk += tl.dot(of_row, tl.trans(of_column), input_precision="ieee") * pairs
                b_kk += tl.dot(of_column, tl.trans(of_column), input_precision="ieee") * pairs
                half = half * 2.0
        store_square(qk, place, b_qk, C)
        store_square(kk, place, b_kk, C)
