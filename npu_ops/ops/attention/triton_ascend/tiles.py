"""Loads and stores tiles of attention, and computes a tile's scores."""

from __future__ import annotations

import triton
import triton.language as tl

# Lower than any unmasked score, but finite: -inf minus -inf would be NaN.
LOWEST = tl.constexpr(-1e30)


@triton.jit
def of_head(x, batch, head, batch_stride, head_stride):
    """Return the address of one head's tokens."""
    return x + tl.cast(batch, tl.int64) * batch_stride + tl.cast(head, tl.int64) * head_stride


@triton.jit
def load_rows(x, stride, first, rows, D: tl.constexpr, BD: tl.constexpr, SIZE: tl.constexpr,
              MASKED: tl.constexpr = True):  # fmt: skip
    """Load rows from `first` of [tokens, D] as [SIZE, BD]; 0 beyond `rows` and D.

    rows: ignored unless MASKED.
    """
    row, d = tl.arange(0, SIZE), tl.arange(0, BD)
    at = x + (first + row).to(tl.int64)[:, None] * stride + d[None, :]
    if MASKED:
        return tl.load(at, mask=(row < rows)[:, None] & (d < D)[None, :], other=0.0)
    elif D != BD:
        return tl.load(at, mask=(row < SIZE)[:, None] & (d < D)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def store_rows(x, value, stride, first, rows, D: tl.constexpr, BD: tl.constexpr,
               SIZE: tl.constexpr):  # fmt: skip
    """Store rows; the inverse of `load_rows`."""
    row, d = tl.arange(0, SIZE), tl.arange(0, BD)
    at = x + (first + row).to(tl.int64)[:, None] * stride + d[None, :]
    tl.store(at, value.to(x.dtype.element_ty), mask=(row < rows)[:, None] & (d < D)[None, :])


@triton.jit
def load_pairs(x, stride, query0, key0, queries, keys, BQ: tl.constexpr, BK: tl.constexpr):
    """Load a tile of a bias or a mask [queries, keys]; 0 outside."""
    query, key = query0 + tl.arange(0, BQ), key0 + tl.arange(0, BK)
    at = x + query.to(tl.int64)[:, None] * stride + key[None, :]
    return tl.load(at, mask=(query < queries)[:, None] & (key < keys)[None, :], other=0)


@triton.jit
def store_pairs(x, value, stride, query0, key0, queries, keys, BQ: tl.constexpr,
                BK: tl.constexpr):  # fmt: skip
    """Store a tile; the inverse of `load_pairs`."""
    query, key = query0 + tl.arange(0, BQ), key0 + tl.arange(0, BK)
    at = x + query.to(tl.int64)[:, None] * stride + key[None, :]
    tl.store(at, value, mask=(query < queries)[:, None] & (key < keys)[None, :])


@triton.jit
def position(row0, BQ: tl.constexpr, STEP: tl.constexpr):
    """Return the position of each row; STEP rows share one position.

    Divides in fp32, because an NPU has no vector division of integers.
    """
    row = row0 + tl.arange(0, BQ)
    if STEP > 1:
        row = ((row.to(tl.float32) + 0.5) * (1.0 / STEP)).to(tl.int32)
    return row


@triton.jit
def scores_of(
    b_q, b_k, bias, mask, bias_stride, mask_stride, query0, key0, queries, keys, shift, left, right,
    scale, softcap, BQ: tl.constexpr, BK: tl.constexpr, STEP: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return a tile's scores, -inf for masked keys (if MASKED), and the slope of the cap.

    keys: number of keys of the sequence. shift: query i's diagonal is key i + shift.
    query0, queries: count rows, of which STEP share a position.
    """
    scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
    slope = 1.0
    if CAPPED:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1) stays right if exp becomes 0 or infinite.
        tanh = 1.0 - 2.0 / (tl.exp(scores * (2.0 / softcap)) + 1.0)
        scores = tanh * softcap
        slope = 1.0 - tanh * tanh
    if bias is not None:
        scores += load_pairs(bias, bias_stride, query0, key0, queries, keys, BQ, BK).to(tl.float32)
    if MASKED:
        key = (key0 + tl.arange(0, BK))[None, :]
        query = position(query0, BQ, STEP)[:, None] + shift
        part = (key < keys) & (query - shift > -1)
        if LEFT:
            part = part & (key >= query - left)
        if RIGHT:
            part = part & (key <= query + right)
        scores = tl.where(part, scores, float("-inf"))
        if mask is not None:
            given = load_pairs(mask, mask_stride, query0, key0, queries, keys, BQ, BK)
            scores = tl.where(given.to(tl.float32) > 0.0, scores, float("-inf"))
    return scores, slope
