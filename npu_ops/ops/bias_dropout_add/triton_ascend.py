"""Shared by bias_dropout_add and attention: the kernels of bias_dropout_add in Triton.

For Ascend and NVIDIA. Reference: reference.py. Attention's dropout uses only `draw`.

A row is cut into 8 lanes (npu_ops/core/rng.py). A program loops over tiles of BR rows by BJ columns
of a lane. It computes four Philox words per element of the tile, which serve the same tile of all
eight lanes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from npu_ops.core import rng
from npu_ops.core.grid import cdiv, next_power_of_2, tile_elements, vector_grid

# Elements of a tile, from the on-chip bytes per element that the vendor's compiler reserves (fp32,
# with a drawn mask).
TILE = tile_elements(96)
WIDEST = 512  # columns: 1 KiB of contiguous bf16 is enough for efficient transfers
# Maximum number of pieces into which the backward divides the rows to sum over them.
PIECES = 48


@triton.jit
def _multiply(a, b: tl.constexpr):
    """Return the high and low 32 bits of a * b, from 16-bit limbs: `umulhi` is scalar on Ascend."""
    low = (a & 0xFFFF) * (b & 0xFFFF)
    middle = (a >> 16) * (b & 0xFFFF) + (low >> 16)
    cross = (a & 0xFFFF) * (b >> 16) + (middle & 0xFFFF)
    high = (a >> 16) * (b >> 16) + (middle >> 16) + (cross >> 16)
    return high, (cross << 16) | (low & 0xFFFF)


@triton.jit
def _xor(a, b):
    """Return a ^ b in three instructions: Ascend has no xor, and the compiler would take four."""
    return (a | b) - (a & b)


@triton.jit
def _round(c0, c1, c2, c3, k0, k1):
    high0, low0 = _multiply(c0, 0xD2511F53)
    high1, low1 = _multiply(c2, 0xCD9E8D57)
    return _xor(high1, _xor(c1, k0)), low1, _xor(high0, _xor(c3, k1)), low0


@triton.jit
def _philox(column, row, low, high, k0, k1):
    """Compute Philox4x32-10 of a tile: column is [1, BJ], row [BR, 1], the rest are scalars.

    In the first two rounds most values are the same along a row or a column, so these rounds are
    cheap. Three rounds are unrolled. The other seven are in a loop, because the time of the
    compiler's analysis is exponential in unrolled rounds.
    """
    c0, c1, c2, c3 = column, row, low, high
    for _ in tl.static_range(3):
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    c3 = c3 + tl.zeros_like(c0)
    for _ in range(7):
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def draw(rng_state, row, column):
    """Return the four words of a tile, uint32 [BR, BJ]; the state is (seed, offset), int64."""
    seed, offset = tl.load(rng_state), tl.load(rng_state + 1)
    return _philox(
        column[None, :].to(tl.uint32),
        row[:, None].to(tl.uint32),
        offset.to(tl.uint32),
        (offset >> 32).to(tl.uint32),
        seed.to(tl.uint32),
        (seed >> 32).to(tl.uint32),
    )


@triton.jit
def _drop(x, word, HALF: tl.constexpr, threshold, scale):
    """Return x * scale if the word's 16-bit half is at least the threshold, else 0."""
    draw = (word >> 16) if HALF else (word & 0xFFFF)
    return tl.where(draw.to(tl.int32) >= threshold, x * scale, 0.0)


@triton.jit
def _lane_columns(column, LANE: tl.constexpr, lane_width, width):
    """Return a lane's columns, and which of them exist."""
    at = LANE * lane_width + column
    return at, (column < lane_width) & (at < width)


@triton.jit
def _add_lane(x, bias, residual, out, row, column, rows, width, lane_width, word, threshold, scale,
              LANE: tl.constexpr, DROPS: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """Compute one tile of one lane."""
    at, exists = _lane_columns(column, LANE, lane_width, width)
    mask = (row < rows)[:, None] & exists[None, :]
    offset = row[:, None].to(tl.int64) * width + at[None, :]
    total = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    if BIAS == "row":
        total += tl.load(bias + at, mask=exists, other=0.0).to(tl.float32)[None, :]
    if BIAS == "full":
        total += tl.load(bias + offset, mask=mask, other=0.0).to(tl.float32)
    if DROPS:
        total = _drop(total, word, LANE % 2, threshold, scale)
    total += tl.load(residual + offset, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offset, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _bias_dropout_add_kernel(
    x, bias, residual, rng_state, out, rows, width, lane_width, threshold, scale,
    DROPS: tl.constexpr, BIAS: tl.constexpr, BR: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(lane_width, BJ)
    for tile in range(tl.program_id(0), tl.cdiv(rows, BR) * across, tl.num_programs(0)):
        row = (tile // across) * BR + tl.arange(0, BR)
        column = (tile % across) * BJ + tl.arange(0, BJ)
        word0, word1, word2, word3 = 0, 0, 0, 0
        if DROPS:
            word0, word1, word2, word3 = draw(rng_state, row, column)
        for lane in tl.static_range(8):
            word = word0 if lane < 2 else word1 if lane < 4 else word2 if lane < 6 else word3
            _add_lane(x, bias, residual, out, row, column, rows, width, lane_width, word, threshold,
                      scale, lane, DROPS, BIAS)  # fmt: skip


def bias_dropout_add(x, bias, residual, rng_state, p, out):
    """Write residual + dropout(x + bias) to `out`; the arguments are the operator's."""
    width = x.shape[-1]
    rows = x.numel() // width
    lane_width = rng.lane_width(width)
    br, bj = _tile(lane_width)
    kind = "none" if bias is None else "row" if bias.numel() == width else "full"
    items = cdiv(rows, br) * cdiv(lane_width, bj)
    _bias_dropout_add_kernel[vector_grid(items, x.device)](
        x, bias, residual, rng_state, out, rows, width, lane_width, *_dropout(p),
        DROPS=rng_state is not None, BIAS=kind, BR=br, BJ=bj,
    )  # fmt: skip


@triton.jit
def _lane_gradient(grad, grad_x, row, column, rows, width, lane_width, word, threshold, scale,
                   LANE: tl.constexpr, DROPS: tl.constexpr):  # fmt: skip
    """Compute one tile of one lane; return the sum over its rows, [BJ]."""
    at, exists = _lane_columns(column, LANE, lane_width, width)
    mask = (row < rows)[:, None] & exists[None, :]
    offset = row[:, None].to(tl.int64) * width + at[None, :]
    kept = tl.load(grad + offset, mask=mask, other=0.0).to(tl.float32)
    if DROPS:
        kept = _drop(kept, word, LANE % 2, threshold, scale)
    tl.store(grad_x + offset, kept.to(grad_x.dtype.element_ty), mask=mask)
    return tl.sum(kept, axis=0)


@triton.jit
def _store_lane(partial, sums, column, width, lane_width, LANE: tl.constexpr):
    at, exists = _lane_columns(column, LANE, lane_width, width)
    tl.store(partial + at, sums, mask=exists)


@triton.jit(do_not_specialize=["rows", "row_tiles"])
def _bias_dropout_add_backward_kernel(
    grad, rng_state, grad_x, partials, rows, width, lane_width, row_tiles, threshold, scale,
    DROPS: tl.constexpr, SUM: tl.constexpr, BR: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """Compute grad_x, and the sums over rows in `partials` `[pieces, width]`.

    A work item is `row_tiles` tiles, one below the other, in each of the eight lanes. It writes its
    sums to one row of partials. The lanes' sums are in eight variables, because Triton cannot index
    a tile by lane.
    """
    across = tl.cdiv(lane_width, BJ)
    pieces = tl.cdiv(rows, BR * row_tiles)
    for work in range(tl.program_id(0), pieces * across, tl.num_programs(0)):
        piece = work // across
        column = (work % across) * BJ + tl.arange(0, BJ)
        zero = tl.zeros((BJ,), tl.float32)
        sum0, sum1, sum2, sum3 = zero, zero, zero, zero
        sum4, sum5, sum6, sum7 = zero, zero, zero, zero
        for tile in range(0, row_tiles):
            row = (piece * row_tiles + tile) * BR + tl.arange(0, BR)
            word0, word1, word2, word3 = 0, 0, 0, 0
            if DROPS:
                word0, word1, word2, word3 = draw(rng_state, row, column)
            sum0 += _lane_gradient(grad, grad_x, row, column, rows, width, lane_width, word0,
                                   threshold, scale, 0, DROPS)  # fmt: skip
            sum1 += _lane_gradient(grad, grad_x, row, column, rows, width, lane_width, word0,
                                   threshold, scale, 1, DROPS)  # fmt: skip
            sum2 += _lane_gradient(grad, grad_x, row, column, rows, width, lane_width, word1,
                                   threshold, scale, 2, DROPS)  # fmt: skip
            sum3 += _lane_gradient(grad, grad_x, row, column, rows, width, lane_width, word1,
                                   threshold, scale, 3, DROPS)  # fmt: skip
            sum4 += _lane_gradient(grad, grad_x, row, column, rows, width, lane_width, word2,
                                   threshold, scale, 4, DROPS)  # fmt: skip
            sum5 += _lane_gradient(grad, grad_x, row, column, rows, width, lane_width, word2,
                                   threshold, scale, 5, DROPS)  # fmt: skip
            sum6 += _lane_gradient(grad, grad_x, row, column, rows, width, lane_width, word3,
                                   threshold, scale, 6, DROPS)  # fmt: skip
            sum7 += _lane_gradient(grad, grad_x, row, column, rows, width, lane_width, word3,
                                   threshold, scale, 7, DROPS)  # fmt: skip
        if SUM:
            partial = partials + piece.to(tl.int64) * width
            _store_lane(partial, sum0, column, width, lane_width, 0)
            _store_lane(partial, sum1, column, width, lane_width, 1)
            _store_lane(partial, sum2, column, width, lane_width, 2)
            _store_lane(partial, sum3, column, width, lane_width, 3)
            _store_lane(partial, sum4, column, width, lane_width, 4)
            _store_lane(partial, sum5, column, width, lane_width, 5)
            _store_lane(partial, sum6, column, width, lane_width, 6)
            _store_lane(partial, sum7, column, width, lane_width, 7)


def bias_dropout_add_backward(grad, rng_state, p, grad_x, grad_bias):
    """Write the gradient of x, and of a [h] bias unless grad_bias is None.

    Each piece of rows has its own row in `partials`, which are summed at the end. So no atomics are
    needed, and the result is deterministic.
    """
    width = grad.shape[-1]
    rows = grad.numel() // width
    lane_width = rng.lane_width(width)
    br, bj = _tile(lane_width)
    row_tiles = cdiv(cdiv(rows, br), PIECES)
    pieces = cdiv(rows, br * row_tiles)
    partials = None if grad_bias is None else grad.new_empty((pieces, width), dtype=torch.float32)
    grid = vector_grid(pieces * cdiv(lane_width, bj), grad.device)
    _bias_dropout_add_backward_kernel[grid](
        grad, rng_state, grad_x, partials, rows, width, lane_width, row_tiles, *_dropout(p),
        DROPS=rng_state is not None, SUM=grad_bias is not None, BR=br, BJ=bj,
    )  # fmt: skip
    if grad_bias is not None:
        grad_bias.copy_(partials.sum(0))


def _tile(lane_width: int) -> tuple[int, int]:
    """Return the rows and columns of a tile; they depend on the width, never on the number
    of rows."""
    columns = min(WIDEST, next_power_of_2(lane_width))
    return TILE // columns, columns


def _dropout(p: float) -> tuple[int, float]:
    """Return the threshold of the draws and the scale of kept elements."""
    return rng.threshold(p), rng.scale(p)
