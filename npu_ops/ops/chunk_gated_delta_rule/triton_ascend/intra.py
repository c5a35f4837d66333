"""Shared by chunk_gated_delta_rule and chunk_kda: computes how tokens of a chunk act on each other.

This part does not depend on the states, so it runs before any state is known.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(x, first, rows, heads, head, D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr,
              column=0):  # fmt: skip
    """Load [C, BD] of one head of x [tokens, heads, D], from `column` on; 0 after the rows or D."""
    row, d = tl.arange(0, C), column + tl.arange(0, BD)
    at = ((first + row).to(tl.int64) * heads + head)[:, None] * D + d[None, :]
    return tl.load(x + at, mask=(row < rows)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def store_rows(x, value, first, rows, heads, head, D: tl.constexpr, BD: tl.constexpr,
               C: tl.constexpr, column=0):  # fmt: skip
    """Store a chunk's rows of one head: the inverse of `load_rows`."""
    row, d = tl.arange(0, C), column + tl.arange(0, BD)
    at = ((first + row).to(tl.int64) * heads + head)[:, None] * D + d[None, :]
    mask = (row < rows)[:, None] & (d < D)[None, :]
    tl.store(x + at, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def decays(g, C: tl.constexpr):
    """Return exp(g_i - g_j) where i >= j, else 0. The mask comes before exp, which may overflow."""
    row = tl.arange(0, C)
    lower = row[:, None] >= row[None, :]
    return tl.exp(tl.where(lower, g[:, None] - g[None, :], float("-inf")))


@triton.jit
def inverse(lower, C: tl.constexpr):
    """Return (1 + lower)^-1 of a strictly lower triangular [C, C], fp32; computes row after row."""
    row = tl.arange(0, C)
    result = 0.0 - lower
    for i in range(1, C):
        is_i = row[:, None] == i
        of_i = tl.sum(tl.where(is_i, result, 0.0), 0)
        of_i += tl.sum(of_i[:, None] * result, 0)
        result = tl.where(is_i, of_i[None, :], result)
    return tl.where(row[:, None] == row[None, :], 1.0, result)


@triton.jit
def inverse_in_halves(lower, C: tl.constexpr):
    """Return the upper and the lower half of `inverse`, [C / 2, C] each.

    It uses slices, which only Ascend's Triton has: the sum over a masked tile in `inverse` takes a
    vector core eight times as long. Each finished row, times its column of `lower`, is subtracted
    from all rows below it. The upper half comes first: its rows are 0 in the right half of columns.
    """
    HALF: tl.constexpr = C // 2
    row, half = tl.arange(0, C), tl.arange(0, HALF)
    columns = tl.trans(lower)
    left = tl.where(row[:, None] == half[None, :], 1.0, 0.0)
    for i in range(0, HALF):
        behind = tl.reshape(tl.extract_slice(columns, (i, 0), (1, C), (1, 1)), (C, 1))
        left -= behind * tl.extract_slice(left, (i, 0), (1, HALF), (1, 1))
    bottom = tl.where(half[:, None] + HALF == row[None, :], 1.0, 0.0)
    rest = tl.extract_slice(left, (HALF, 0), (HALF, HALF), (1, 1))
    bottom = tl.insert_slice(bottom, rest, (0, 0), (HALF, HALF), (1, 1))
    for i in range(0, HALF - 1):
        behind = tl.extract_slice(columns, (HALF + i, HALF), (1, HALF), (1, 1))
        behind = tl.reshape(behind, (HALF, 1))
        bottom -= behind * tl.extract_slice(bottom, (i, 0), (1, C), (1, 1))
    top = tl.extract_slice(left, (0, 0), (HALF, HALF), (1, 1))
    none = tl.zeros((HALF, C), tl.float32)
    return tl.insert_slice(none, top, (0, 0), (HALF, HALF), (1, 1)), bottom


@triton.jit
def over_norms(x, first, rows, heads, head, eps, K: tl.constexpr, C: tl.constexpr,
               PART: tl.constexpr = 64):  # fmt: skip
    """Return 1 over the norms of a chunk's rows of one head, fp32 [C].

    It reads PART columns at a time, because whole rows of 256 keys do not fit on chip.
    """
    squares = tl.zeros((C, PART), tl.float32)
    for column in range(0, K, PART):
        part = load_rows(x, first, rows, heads, head, K, PART, C, column).to(tl.float32)
        squares += part * part
    return 1.0 / tl.sqrt(tl.sum(squares, 1) + eps)


@triton.jit
def load_over_norms(stored, place, C: tl.constexpr):
    """Load 1 over the norms of a chunk's rows; return 1 where rows are not normalised."""
    if stored is None:
        return tl.full((C,), 1.0, tl.float32)
    else:
        return tl.load(stored + place * C + tl.arange(0, C))


@triton.jit
def load_tile(x, place, C: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, column=0):
    """Load BK columns of matrix `place` in [places, C, K], 0 beyond column K."""
    row, key = tl.arange(0, C), column + tl.arange(0, BK)
    at = place * (C * K) + row[:, None] * K + key[None, :]
    if K % BK == 0:
        return tl.load(x + at)
    else:
        return tl.load(x + at, mask=(row < C)[:, None] & (key < K)[None, :], other=0.0)


@triton.jit
def store_tile(x, value, place, C: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, column=0):
    """Store BK columns of matrix `place` in [places, C, K]: the inverse of `load_tile`."""
    row, key = tl.arange(0, C), column + tl.arange(0, BK)
    at = place * (C * K) + row[:, None] * K + key[None, :]
    value = value.to(x.dtype.element_ty)
    if K % BK == 0:
        tl.store(x + at, value)
    else:
        tl.store(x + at, value, mask=(row < C)[:, None] & (key < K)[None, :])


@triton.jit
def load_square(squares, place, C: tl.constexpr):
    """Load matrix `place` of [places, C, C]."""
    row = tl.arange(0, C)
    return tl.load(squares + place * (C * C) + row[:, None] * C + row[None, :])


@triton.jit
def store_square(squares, place, value, C: tl.constexpr, FIRST: tl.constexpr = 0,
                 ROWS: tl.constexpr = None):  # fmt: skip
    """Store matrix `place`, or its ROWS rows from FIRST on: the inverse of `load_square`."""
    row = FIRST + tl.arange(0, C if ROWS is None else ROWS)
    at = place * (C * C) + row[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(squares + at, value.to(squares.dtype.element_ty))


@triton.jit(do_not_specialize=["number"])
def products_kernel(
    q, k, spans, qk, kk, number, H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Write q k^T and k k^T of each chunk and head, fp32 [chunks, H, C, C], on the matrix unit."""
    for item in range(tl.program_id(0), number * H, tl.num_programs(0)):
        chunk, head = item // H, item % H
        first, rows = tl.load(spans + 2 * chunk), tl.load(spans + 2 * chunk + 1)
        b_q = load_rows(q, first, rows, H, head, K, BK, C)
        b_k = load_rows(k, first, rows, H, head, K, BK, C)
        place = tl.cast(item, tl.int64)
        store_square(qk, place, tl.dot(b_q, tl.trans(b_k), input_precision="ieee"), C)
        store_square(kk, place, tl.dot(b_k, tl.trans(b_k), input_precision="ieee"), C)


@triton.jit(do_not_specialize=["number", "scale"])
def intra_kernel(
    q, k, qk, kk, g_sums, betas, spans, solved, scores, over_q, over_k, scale, number, eps,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, WEIGHED: tl.constexpr,
    SLICES: tl.constexpr = False,
):  # fmt: skip
    """Write solved and scores, [chunks, HV, C, C].

    solved is (1 + tril(beta k k^T decay, -1))^-1, and scores is tril(scale q k^T decay).
    WEIGHED: multiply the columns of solved by betas.
    g_sums: None if qk and kk include the decays and the scale, with zeros above the diagonal.
    over_q, over_k: None, or outputs [chunks, H, C]: 1 over the norms of q and k, also applied here.
    """
    row = tl.arange(0, C)
    for item in range(tl.program_id(0), number * H, tl.num_programs(0)):
        chunk, head = item // H, item % H
        here = tl.cast(item, tl.int64)
        b_qk, b_kk = load_square(qk, here, C), load_square(kk, here, C)
        if over_k is not None:
            first, rows = tl.load(spans + 2 * chunk), tl.load(spans + 2 * chunk + 1)
            of_q = over_norms(q, first, rows, H, head, eps, K, C)
            of_k = over_norms(k, first, rows, H, head, eps, K, C)
            tl.store(over_q + here * C + row, of_q)
            tl.store(over_k + here * C + row, of_k)
            b_qk = b_qk * of_q[:, None] * of_k[None, :]
            b_kk = b_kk * of_k[:, None] * of_k[None, :]
        for value_head in range(head * (HV // H), (head + 1) * (HV // H)):
            place = tl.cast(chunk * HV + value_head, tl.int64)
            b_beta = tl.load(betas + place * C + row)
            if g_sums is None:
                store_square(scores, place, b_qk, C)
                weighed = b_kk * b_beta[:, None]
            else:
                decay = decays(tl.load(g_sums + place * C + row), C)
                store_square(scores, place, b_qk * decay * scale, C)
                weighed = b_kk * decay * b_beta[:, None]
            lower = tl.where(row[:, None] > row[None, :], weighed, 0.0)
            weights = b_beta[None, :] if WEIGHED else 1.0
            if SLICES:
                top, bottom = inverse_in_halves(lower, C)
                store_square(solved, place, top * weights, C, 0, C // 2)
                store_square(solved, place, bottom * weights, C, C // 2, C // 2)
            else:
                store_square(solved, place, inverse(lower, C) * weights, C)
