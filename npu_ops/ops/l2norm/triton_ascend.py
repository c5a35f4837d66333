"""Shared by l2norm, causal_conv1d, chunk_gated_delta_rule and chunk_kda: l2norm in Triton.

For Ascend and NVIDIA. Reference: reference.py

Rows wider than a tile are read twice, in blocks of columns (core/rows_triton_ascend.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from npu_ops.core.grid import tile_elements
from npu_ops.core.rows_triton_ascend import launch_rows, load_row, row_tiles, rows_of, store_row

# Elements per tile. Argument: on-chip bytes that the vendor's compiler reserves per fp32 element.
TILE = tile_elements(24)
BACKWARD_TILE = tile_elements(40)


@triton.jit
def _reciprocal_norm(squares, eps):
    """Return 1 over the norm, fp32 [BO, BI, 1], from the sums of squares of rows [BO, BI]."""
    return (1.0 / tl.sqrt(squares + eps))[:, :, None]


@triton.jit
def _gradient(grad, value, rstd, dots):
    """Return the gradient of `value`. dots: sums of grad * value over whole rows, [BO, BI]."""
    along = dots[:, :, None] * rstd
    return rstd * (grad - value * rstd * along)


@triton.jit
def normalise(value, eps):
    """Divide whole rows of a tile, fp32 [BO, BI, BD], by their norm."""
    return value * _reciprocal_norm(tl.sum(value * value, axis=2), eps)


@triton.jit
def normalise_backward(grad, value, eps):
    """Return the gradient of `value`; `grad` is the gradient of its normalised rows."""
    rstd = _reciprocal_norm(tl.sum(value * value, axis=2), eps)
    return _gradient(grad, value, rstd, tl.sum(grad * value, axis=2))


@triton.jit(do_not_specialize=["outer", "inner"])
def _l2norm_kernel(
    x, out, outer, inner, eps, x_outer, x_inner, out_outer, out_inner,
    D: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    for tile in range(tl.program_id(0), row_tiles(outer, inner, BO, BI), tl.num_programs(0)):
        squares = tl.zeros((BO, BI), tl.float32)
        for start in range(0, D, BD):
            o, i, d, mask = rows_of(tile, start, outer, inner, D, BO, BI, BD)
            value = load_row(x, o, i, d, mask, x_outer, x_inner)
            squares += tl.sum(value * value, axis=2)
        rstd = _reciprocal_norm(squares, eps)
        for start in range(0, D, BD):
            o, i, d, mask = rows_of(tile, start, outer, inner, D, BO, BI, BD)
            value = load_row(x, o, i, d, mask, x_outer, x_inner)
            store_row(out, o, i, d, mask, out_outer, out_inner, value * rstd)


@triton.jit(do_not_specialize=["outer", "inner"])
def _l2norm_backward_kernel(
    grad, x, grad_x, outer, inner, eps,
    grad_outer, grad_inner, x_outer, x_inner, out_outer, out_inner,
    D: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    for tile in range(tl.program_id(0), row_tiles(outer, inner, BO, BI), tl.num_programs(0)):
        squares = tl.zeros((BO, BI), tl.float32)
        dots = tl.zeros((BO, BI), tl.float32)
        for start in range(0, D, BD):
            o, i, d, mask = rows_of(tile, start, outer, inner, D, BO, BI, BD)
            value = load_row(x, o, i, d, mask, x_outer, x_inner)
            grad_out = load_row(grad, o, i, d, mask, grad_outer, grad_inner)
            squares += tl.sum(value * value, axis=2)
            dots += tl.sum(grad_out * value, axis=2)
        rstd = _reciprocal_norm(squares, eps)
        for start in range(0, D, BD):
            o, i, d, mask = rows_of(tile, start, outer, inner, D, BO, BI, BD)
            value = load_row(x, o, i, d, mask, x_outer, x_inner)
            grad_out = load_row(grad, o, i, d, mask, grad_outer, grad_inner)
            grad_value = _gradient(grad_out, value, rstd, dots)
            store_row(grad_x, o, i, d, mask, out_outer, out_inner, grad_value)


def l2norm(x, eps, out):
    """Write l2norm(x) to `out`; both are [outer, inner, D]."""
    launch_rows(_l2norm_kernel, (x, out), TILE, eps)


def l2norm_backward(grad, x, eps, grad_x):
    """Write the gradient of x to `grad_x`; all are [outer, inner, D]."""
    launch_rows(_l2norm_backward_kernel, (grad, x, grad_x), BACKWARD_TILE, eps)
