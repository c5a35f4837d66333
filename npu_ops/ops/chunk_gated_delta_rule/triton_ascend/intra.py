"""Within a chunk, before any state is known: how its tokens act on each other."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(x, first, rows, heads, head, D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr,
              column=0):  # fmt: skip
    """A chunk's rows of one head of [tokens, heads, D]: [C, BD] columns from `column`, 0 beyond."""
    row, d = tl.arange(0, C), column + tl.arange(0, BD)
    at = ((first + row).to(tl.int64) * heads + head)[:, None] * D + d[None, :]
    return tl.load(x + at, mask=(row < rows)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def store_rows(x, value, first, rows, heads, head, D: tl.constexpr, BD: tl.constexpr,
               C: tl.constexpr, column=0):  # fmt: skip
    """The inverse of `load_rows`."""
    row, d = tl.arange(0, C), column + tl.arange(0, BD)
    at = ((first + row).to(tl.int64) * heads + head)[:, None] * D + d[None, :]
    mask = (row < rows)[:, None] & (d < D)[None, :]
    tl.store(x + at, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def decays(g, C: tl.constexpr):
    """exp(g_i - g_j) where i >= j, else 0. Masked before exp, which could overflow."""
    row = tl.arange(0, C)
    lower = row[:, None] >= row[None, :]
    return tl.exp(tl.where(lower, g[:, None] - g[None, :], float("-inf")))


@triton.jit
def inverse(lower, C: tl.constexpr):
    """(1 + lower)^-1 of a strictly lower triangular [C, C] in fp32, row after row."""
    row = tl.arange(0, C)
    result = 0.0 - lower
    for i in range(1, C):
        is_i = row[:, None] == i
        of_i = tl.sum(tl.where(is_i, result, 0.0), 0)
        of_i += tl.sum(of_i[:, None] * result, 0)
        result = tl.where(is_i, of_i[None, :], result)
    return tl.where(row[:, None] == row[None, :], 1.0, result)


@triton.jit
def over_norms(products, eps, C: tl.constexpr):
    """1 over the norms of rows, fp32 [C], of their products with each other [C, C]: vector cores
    have no room for the rows themselves."""
    row = tl.arange(0, C)
    squares = tl.sum(tl.where(row[:, None] == row[None, :], products, 0.0), 1)
    return 1.0 / tl.sqrt(squares + eps)


@triton.jit
def load_over_norms(stored, place, C: tl.constexpr):
    """1 over the norms of a chunk's rows; 1 where rows are taken as they are."""
    if stored is None:
        return tl.full((C,), 1.0, tl.float32)
    else:
        return tl.load(stored + place * C + tl.arange(0, C))


@triton.jit(do_not_specialize=["number", "scale"])
def intra_kernel(
    q, k, g_sums, betas, spans, solved, scores, over_q, over_k, scale, number, eps,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    WEIGHED: tl.constexpr,
):  # fmt: skip
    """solved: (1 + tril(beta k k^T decay, -1))^-1; scores: tril(scale q k^T decay); [.., C, C].

    WEIGHED: the columns of solved are multiplied by betas.
    over_q, over_k: None, or 1 over the norms of q and k [chunks, H, C], written and multiplied.
    """
    row = tl.arange(0, C)
    for item in range(tl.program_id(0), number * H, tl.num_programs(0)):
        chunk, head = item // H, item % H
        first, rows = tl.load(spans + 2 * chunk), tl.load(spans + 2 * chunk + 1)
        wide = solved.dtype.element_ty
        b_q = load_rows(q, first, rows, H, head, K, BK, C).to(wide)
        b_k = load_rows(k, first, rows, H, head, K, BK, C).to(wide)
        qk = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        kk = tl.dot(b_k, tl.trans(b_k), input_precision="ieee")
        if over_k is not None:
            qq = tl.dot(b_q, tl.trans(b_q), input_precision="ieee")
            of_q, of_k = over_norms(qq, eps, C), over_norms(kk, eps, C)
            to = tl.cast(item, tl.int64) * C + row
            tl.store(over_q + to, of_q)
            tl.store(over_k + to, of_k)
            qk = qk * of_q[:, None] * of_k[None, :]
            kk = kk * of_k[:, None] * of_k[None, :]
        for value_head in range(head * (HV // H), (head + 1) * (HV // H)):
            place = tl.cast(chunk * HV + value_head, tl.int64) * C
            b_g, b_beta = tl.load(g_sums + place + row), tl.load(betas + place + row)
            decay = decays(b_g, C)
            at = place * C + row[:, None] * C + row[None, :]
            tl.store(scores + at, (qk * decay * scale).to(wide))
            lower = tl.where(row[:, None] > row[None, :], kk * decay * b_beta[:, None], 0.0)
            found = inverse(lower, C)
            if WEIGHED:
                found = found * b_beta[None, :]
            tl.store(solved + at, found.to(wide))
