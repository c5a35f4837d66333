"""Row kernels in Triton: a program walks over tiles of whole rows of [outer, inner, D] tensors.

A tile is [BO, BI, BD]: BO outer rows by BI inner ones, D padded to BD. `npu-ops new-op` writes a
kernel of this form.
"""

from __future__ import annotations

import triton
import triton.language as tl

from npu_ops.core.grid import cdiv, next_power_of_2, vector_grid

# Narrower rows than this are not worth a vector instruction.
NARROWEST = 16


@triton.jit
def row_tiles(outer, inner, BO: tl.constexpr, BI: tl.constexpr):
    """How many tiles there are."""
    return tl.cdiv(outer, BO) * tl.cdiv(inner, BI)


@triton.jit
def rows_of(
    tile, outer, inner, D: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr, BD: tl.constexpr
):
    """The outer rows, inner rows and columns of a tile, and which of them there are."""
    across = tl.cdiv(inner, BI)
    o = (tile // across) * BO + tl.arange(0, BO)[:, None, None]
    i = (tile % across) * BI + tl.arange(0, BI)[None, :, None]
    d = tl.arange(0, BD)[None, None, :]
    return o.to(tl.int64), i.to(tl.int64), d, (o < outer) & (i < inner) & (d < D)


@triton.jit
def load_row(x, o, i, d, mask, outer_stride, inner_stride):
    """A tile of `x` in fp32; 0 where there is nothing."""
    return tl.load(x + o * outer_stride + i * inner_stride + d, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_row(out, o, i, d, mask, outer_stride, inner_stride, value):
    """Write a tile, rounded to the dtype of `out`."""
    to = out + o * outer_stride + i * inner_stride + d
    tl.store(to, value.to(out.dtype.element_ty), mask=mask)


def launch_rows(kernel, tensors, tile: int, *scalars) -> None:
    """Launch `kernel` on tensors [outer, inner, D], last dimension contiguous.

    It takes the tensors, outer, inner, `scalars`, the tensors' outer and inner strides, D and the
    tile's BO, BI and BD. tile: how many elements one has at the most (`tile_elements`).
    """
    outer, inner, width = tensors[0].shape
    padded = max(NARROWEST, next_power_of_2(width))
    fits = max(1, tile // padded)  # rows in a tile
    bi = min(fits, next_power_of_2(inner))
    bo = fits // bi
    strides = (stride for tensor in tensors for stride in tensor.stride()[:2])
    kernel[vector_grid(cdiv(outer, bo) * cdiv(inner, bi), tensors[0].device)](
        *tensors, outer, inner, *scalars, *strides, D=width, BO=bo, BI=bi, BD=padded
    )
