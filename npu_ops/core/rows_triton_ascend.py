"""Row kernels in Triton: a program loops over tiles of rows of [outer, inner, D] tensors.

A tile is [BO, BI, BD]: BO outer rows by BI inner ones, and BD of their columns. A kernel loops over
the tiles of rows, and in each over the columns:

    for tile in range(tl.program_id(0), row_tiles(outer, inner, BO, BI), tl.num_programs(0)):
        squares = tl.zeros((BO, BI), tl.float32)
        for start in range(0, D, BD):      # a reduction needs a loop of its own
            o, i, d, mask = rows_of(tile, start, outer, inner, D, BO, BI, BD)
            value = load_row(x, o, i, d, mask, x_outer, x_inner)
            squares += tl.sum(value * value, axis=2)
        for start in range(0, D, BD):      # an elementwise formula needs this loop alone
            o, i, d, mask = rows_of(tile, start, outer, inner, D, BO, BI, BD)
            value = load_row(x, o, i, d, mask, x_outer, x_inner)
            store_row(out, o, i, d, mask, out_outer, out_inner, value * squares[:, :, None])

Rows of any width work. If a row fits in a tile, each loop has one step; the compiler then merges
the loads of both loops, so that the row is read once. `npu-ops new-op` writes such a kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from npu_ops.core.grid import cdiv, next_power_of_2, vector_grid

# Minimum number of columns of a tile: fewer would waste most of a vector instruction.
NARROWEST = 16


@triton.jit
def row_tiles(outer, inner, BO: tl.constexpr, BI: tl.constexpr):
    """Return the number of row tiles."""
    return tl.cdiv(outer, BO) * tl.cdiv(inner, BI)


@triton.jit
def rows_of(
    tile, start, outer, inner,
    D: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Return indices of a tile's outer rows, inner rows and columns, and its mask.

    start: first column.
    """
    across = tl.cdiv(inner, BI)
    o = (tile // across) * BO + tl.arange(0, BO)[:, None, None]
    i = (tile % across) * BI + tl.arange(0, BI)[None, :, None]
    d = start + tl.arange(0, BD)[None, None, :]
    return o.to(tl.int64), i.to(tl.int64), d, (o < outer) & (i < inner) & (d < D)


@triton.jit
def load_row(x, o, i, d, mask, outer_stride, inner_stride):
    """Load a tile of `x` as fp32; 0 where the mask is false."""
    return tl.load(x + o * outer_stride + i * inner_stride + d, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_row(out, o, i, d, mask, outer_stride, inner_stride, value):
    """Store a tile, rounded to the dtype of `out`."""
    to = out + o * outer_stride + i * inner_stride + d
    tl.store(to, value.to(out.dtype.element_ty), mask=mask)


def launch_rows(kernel, tensors, tile: int, *scalars) -> None:
    """Launch `kernel` on tensors [outer, inner, D], last dimension contiguous.

    The kernel's arguments: the tensors, outer, inner, `scalars`, outer and inner stride of each
    tensor, D, and the tile's BO, BI and BD.
    tile: maximum number of elements of a tile, a power of 2 (`tile_elements`). Wider rows are cut
    into blocks of `tile` columns.
    """
    outer, inner, width = tensors[0].shape
    bd = min(max(NARROWEST, next_power_of_2(width)), tile)
    bi = min(tile // bd, next_power_of_2(inner))
    bo = tile // bd // bi
    strides = (stride for tensor in tensors for stride in tensor.stride()[:2])
    kernel[vector_grid(cdiv(outer, bo) * cdiv(inner, bi), tensors[0].device)](
        *tensors, outer, inner, *scalars, *strides, D=width, BO=bo, BI=bi, BD=bd
    )
