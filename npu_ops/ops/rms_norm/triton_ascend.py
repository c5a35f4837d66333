"""rms_norm and add_rms_norm in Triton, for Ascend and NVIDIA. Reference: reference.py

Rows wider than a tile are read twice, in blocks of columns (core/rows_triton_ascend.py). In the
backward, the rows are cut into pieces. A program sums the gradient of weight over a piece, and the
sums of all pieces are added at the end. Without atomics, the result is the same in each run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from npu_ops.core.grid import cdiv, next_power_of_2, tile_elements, vector_grid
from npu_ops.core.rows_triton_ascend import (
    NARROWEST,
    launch_rows,
    load_row,
    row_tiles,
    rows_of,
    store_row,
)

# Elements per tile. Argument: on-chip bytes that the vendor's compiler reserves per fp32 element.
TILE = tile_elements(24)
BACKWARD_TILE = tile_elements(48)
# Maximum number of pieces into which the rows are cut to sum over them.
PIECES = 48


@triton.jit
def _load_weight(weight, d, shift, D: tl.constexpr):
    """Load weight, or 1 + weight if shift is 1."""
    return tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32) + shift


@triton.jit
def _reciprocal_rms(squares, eps, D: tl.constexpr):
    """Return 1 over the RMS, fp32 [BO, BI, 1], from the sums of squares of rows [BO, BI]."""
    return (1.0 / tl.sqrt(squares / D + eps))[:, :, None]


@triton.jit(do_not_specialize=["outer", "inner"])
def _rms_norm_kernel(
    x, out, outer, inner, weight, shift, eps, x_outer, x_inner, out_outer, out_inner,
    D: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    for tile in range(tl.program_id(0), row_tiles(outer, inner, BO, BI), tl.num_programs(0)):
        squares = tl.zeros((BO, BI), tl.float32)
        for start in range(0, D, BD):
            o, i, d, mask = rows_of(tile, start, outer, inner, D, BO, BI, BD)
            value = load_row(x, o, i, d, mask, x_outer, x_inner)
            squares += tl.sum(value * value, axis=2)
        r = _reciprocal_rms(squares, eps, D)
        for start in range(0, D, BD):
            o, i, d, mask = rows_of(tile, start, outer, inner, D, BO, BI, BD)
            value = load_row(x, o, i, d, mask, x_outer, x_inner)
            y = value * r * _load_weight(weight, d, shift, D)
            store_row(out, o, i, d, mask, out_outer, out_inner, y)


@triton.jit
def _load_sum(x, residual, o, i, d, mask, x_outer, x_inner, r_outer, r_inner):
    """Load a tile of x + residual in fp32, rounded to the dtype of x."""
    value = load_row(x, o, i, d, mask, x_outer, x_inner)
    value += load_row(residual, o, i, d, mask, r_outer, r_inner)
    return value.to(x.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=["outer", "inner"])
def _add_rms_norm_kernel(
    x, residual, out, total, outer, inner, weight, shift, eps, x_outer, x_inner, r_outer, r_inner,
    out_outer, out_inner, total_outer, total_inner,
    D: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    for tile in range(tl.program_id(0), row_tiles(outer, inner, BO, BI), tl.num_programs(0)):
        squares = tl.zeros((BO, BI), tl.float32)
        for start in range(0, D, BD):
            o, i, d, mask = rows_of(tile, start, outer, inner, D, BO, BI, BD)
            value = _load_sum(x, residual, o, i, d, mask, x_outer, x_inner, r_outer, r_inner)
            squares += tl.sum(value * value, axis=2)
        r = _reciprocal_rms(squares, eps, D)
        for start in range(0, D, BD):
            o, i, d, mask = rows_of(tile, start, outer, inner, D, BO, BI, BD)
            value = _load_sum(x, residual, o, i, d, mask, x_outer, x_inner, r_outer, r_inner)
            store_row(total, o, i, d, mask, total_outer, total_inner, value)
            y = value * r * _load_weight(weight, d, shift, D)
            store_row(out, o, i, d, mask, out_outer, out_inner, y)


@triton.jit
def _exists(tile, outer, inner, BO: tl.constexpr, BI: tl.constexpr):
    """Return which rows of a tile exist, [BO, BI, 1].

    The rows that `rows_of` returns are int64, which is slow to compare.
    """
    across = tl.cdiv(inner, BI)
    o = tile // across * BO + tl.arange(0, BO)[:, None, None]
    i = tile % across * BI + tl.arange(0, BI)[None, :, None]
    return (o < outer) & (i < inner)


@triton.jit(do_not_specialize=["outer", "inner", "piece_tiles"])
def _backward_kernel(
    grad, grad_total, x, weight, grad_x, sums, outer, inner, piece_tiles, shift, eps, g_outer,
    g_inner, t_outer, t_inner, x_outer, x_inner, gx_outer, gx_inner,
    D: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write the gradients. A piece of work is `piece_tiles` tiles of whole rows.

    Each piece writes one row of sums. grad_total: None, or a gradient to add to that of x.
    """
    tiles = row_tiles(outer, inner, BO, BI)
    column = tl.arange(0, BD)
    for piece in range(tl.program_id(0), tl.cdiv(tiles, piece_tiles), tl.num_programs(0)):
        w = _load_weight(weight, column, shift, D)[None, None, :]
        piece_sum = tl.zeros((BD,), tl.float32)
        for step in range(0, piece_tiles):
            tile = piece * piece_tiles + step
            o, i, d, mask = rows_of(tile, 0, outer, inner, D, BO, BI, BD)
            value = load_row(x, o, i, d, mask, x_outer, x_inner)
            g = load_row(grad, o, i, d, mask, g_outer, g_inner)
            r = _reciprocal_rms(tl.sum(value * value, axis=2), eps, D)
            # If eps is 0, the r of an absent row is infinite.
            r = tl.where(_exists(tile, outer, inner, BO, BI), r, 0.0)
            grad_n = g * w
            along = r * r * (tl.sum(grad_n * value, axis=2) / D)[:, :, None]
            of_x = r * (grad_n - value * along)
            if grad_total is not None:
                of_x += load_row(grad_total, o, i, d, mask, t_outer, t_inner)
            store_row(grad_x, o, i, d, mask, gx_outer, gx_inner, of_x)
            piece_sum += tl.sum(tl.reshape(g * (value * r), (BO * BI, BD)), axis=0)
        tl.store(sums + tl.cast(piece, tl.int64) * D + column, piece_sum, mask=column < D)


@triton.jit(do_not_specialize=["outer", "inner"])
def _wide_backward_kernel(
    grad, grad_total, x, weight, grad_x, reciprocals, outer, inner, shift, eps, g_outer, g_inner,
    t_outer, t_inner, x_outer, x_inner, gx_outer, gx_inner, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write the gradient of x for rows wider than a tile, and the reciprocal RMS of each row.

    `_wide_weight_kernel` uses the reciprocals for the gradient of weight.
    """
    for row in range(tl.program_id(0), outer * inner, tl.num_programs(0)):
        squares = tl.zeros((1, 1), tl.float32)
        dots = tl.zeros((1, 1), tl.float32)
        for start in range(0, D, BD):
            o, i, d, mask = rows_of(row, start, outer, inner, D, 1, 1, BD)
            value = load_row(x, o, i, d, mask, x_outer, x_inner)
            g = load_row(grad, o, i, d, mask, g_outer, g_inner)
            squares += tl.sum(value * value, axis=2)
            dots += tl.sum(g * _load_weight(weight, d, shift, D) * value, axis=2)
        r = _reciprocal_rms(squares, eps, D)
        along = r * r * (dots / D)[:, :, None]
        tl.store(reciprocals + row + tl.zeros((1, 1, 1), tl.int32), r)
        for start in range(0, D, BD):
            o, i, d, mask = rows_of(row, start, outer, inner, D, 1, 1, BD)
            value = load_row(x, o, i, d, mask, x_outer, x_inner)
            g = load_row(grad, o, i, d, mask, g_outer, g_inner)
            of_x = r * (g * _load_weight(weight, d, shift, D) - value * along)
            if grad_total is not None:
                of_x += load_row(grad_total, o, i, d, mask, t_outer, t_inner)
            store_row(grad_x, o, i, d, mask, gx_outer, gx_inner, of_x)


@triton.jit(do_not_specialize=["outer", "inner", "piece_rows"])
def _wide_weight_kernel(
    grad, x, reciprocals, sums, outer, inner, piece_rows, g_outer, g_inner, x_outer, x_inner,
    D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Sum the gradient of weight; a piece of work is BD columns of `piece_rows` rows."""
    rows, across = outer * inner, tl.cdiv(D, BD)
    for work in range(tl.program_id(0), tl.cdiv(rows, piece_rows) * across, tl.num_programs(0)):
        piece, start = work // across, work % across * BD
        total = tl.zeros((1, 1, BD), tl.float32)
        for step in range(0, piece_rows):
            row = piece * piece_rows + step
            o, i, d, mask = rows_of(row, start, outer, inner, D, 1, 1, BD)
            r = tl.load(reciprocals + row, mask=row < rows, other=0.0)
            value = load_row(x, o, i, d, mask, x_outer, x_inner)
            total += load_row(grad, o, i, d, mask, g_outer, g_inner) * value * r
        d = start + tl.arange(0, BD)[None, None, :]
        tl.store(sums + tl.cast(piece, tl.int64) * D + d, total, mask=d < D)


def rms_norm(x, weight, eps, zero_centered, out):
    """Write the norm to `out`. Arguments as in the operator."""
    launch_rows(_rms_norm_kernel, (x, out), TILE, weight, float(zero_centered), eps)


def add_rms_norm(x, residual, weight, eps, zero_centered, out, total):
    """Write the norm of the sum, and the sum."""
    tensors, shift = (x, residual, out, total), float(zero_centered)
    launch_rows(_add_rms_norm_kernel, tensors, TILE, weight, shift, eps)


def rms_norm_backward(grad, x, weight, eps, zero_centered, grad_x, grad_weight):
    """Write the gradients."""
    add_rms_norm_backward(grad, None, x, weight, eps, zero_centered, grad_x, grad_weight)


def add_rms_norm_backward(
    grad_out, grad_total, total, weight, eps, zero_centered, grad_x, grad_weight
):
    """Write the gradients; grad_total may be None."""
    outer, inner, width = total.shape
    shift, bd = float(zero_centered), max(NARROWEST, next_power_of_2(width))
    tensors = grad_out, grad_total, total, grad_x
    strides = [s for x in tensors for s in ((0, 0) if x is None else x.stride()[:2])]
    fits = BACKWARD_TILE // (
        2 if total.dtype == torch.float32 else 1
    )  # double buffers of fp32 inputs take more memory
    if bd > fits:
        sums = _wide_backward(*tensors, weight, shift, eps, strides)
    else:
        bi = min(fits // bd, next_power_of_2(inner))
        bo = fits // bd // bi
        tiles = cdiv(outer, bo) * cdiv(inner, bi)
        piece_tiles = cdiv(tiles, PIECES)
        pieces = cdiv(tiles, piece_tiles)
        sums = total.new_empty((pieces, width), dtype=torch.float32)
        _backward_kernel[vector_grid(pieces, total.device)](
            grad_out, grad_total, total, weight, grad_x, sums, outer, inner, piece_tiles, shift,
            eps, *strides, D=width, BO=bo, BI=bi, BD=bd,
        )  # fmt: skip
    grad_weight.copy_(sums.sum(0))


def _wide_backward(grad, grad_total, x, grad_x, weight, shift, eps, strides):
    """Write the gradient of x; return the pieces' sums of the gradient of weight."""
    outer, inner, width = x.shape
    rows, block = outer * inner, BACKWARD_TILE
    reciprocals = x.new_empty(rows, dtype=torch.float32)
    _wide_backward_kernel[vector_grid(rows, x.device)](
        grad, grad_total, x, weight, grad_x, reciprocals, outer, inner, shift, eps, *strides,
        D=width, BD=block,
    )  # fmt: skip
    piece_rows = cdiv(rows, PIECES)
    pieces = cdiv(rows, piece_rows)
    sums = x.new_empty((pieces, width), dtype=torch.float32)
    _wide_weight_kernel[vector_grid(pieces * cdiv(width, block), x.device)](
        grad, x, reciprocals, sums, outer, inner, piece_rows, *strides[:2], *strides[4:6], D=width,
        BD=block,
    )  # fmt: skip
    return sums
