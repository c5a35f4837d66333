"""Shared by linear and grouped_linear: linear in Triton. Reference: reference.py

A program computes tiles of BM rows by BN columns, each a sum over K in ascending steps of BK. Tile
sizes and the order of each sum do not depend on the number of rows. grouped_linear uses `product`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from npu_ops.core import hardware
from npu_ops.core.grid import cdiv
from npu_ops.ops.linear.cpu import linear_backward

__all__ = ["linear", "linear_backward"]

ROWS, COLUMNS = 128, 128  # tile size; in fp32 it fills half of the matrix unit's accumulator
STEP_BYTES = 256  # bytes of a row per step; two operands fill a quarter of the input buffers


@triton.jit
def _load(x, row, column, rows, columns, stride):
    """Load a tile of a matrix `[rows, columns]`; elements outside of the matrix are 0."""
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    return tl.load(x + row.to(tl.int64)[:, None] * stride + column[None, :], mask=mask, other=0.0)


@triton.jit
def product(
    x, weight, row, column, rows, columns, depth, x_stride, weight_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return rows of x times rows of weight, fp32 `[BM, BN]`, summed in ascending steps of BK."""
    total = tl.zeros((BM, BN), tl.float32)
    for begin in range(0, depth, BK):
        step = begin + tl.arange(0, BK)
        left = _load(x, row, step, rows, depth, x_stride)
        right = _load(weight, column, step, columns, depth, weight_stride)
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x, weight, bias, out, rows, columns, depth, x_stride, weight_stride, out_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(columns, BN)
    for tile in range(tl.program_id(0), tl.cdiv(rows, BM) * across, tl.num_programs(0)):
        row = (tile // across) * BM + tl.arange(0, BM)
        column = (tile % across) * BN + tl.arange(0, BN)
        total = product(x, weight, row, column, rows, columns, depth, x_stride, weight_stride,
                        BM, BN, BK)  # fmt: skip
        if bias is not None:
            offset = tl.load(bias + column, mask=column < columns, other=0.0)
            total += offset.to(tl.float32)[None, :]
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        to = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=mask)


def linear(x, weight, bias, out):
    """Write `x weight^T + bias`: x `[M, K]`, weight `[N, K]`, out `[M, N]`."""
    (rows, depth), columns = x.shape, weight.shape[0]
    tiles = cdiv(rows, ROWS) * cdiv(columns, COLUMNS)
    grid = (min(tiles, hardware.num_cube_cores(x.device)),)
    _linear_kernel[grid](
        x, weight, bias, out, rows, columns, depth, x.stride(0), weight.stride(0), out.stride(0),
        BM=ROWS, BN=COLUMNS, BK=STEP_BYTES // x.element_size(),
    )  # fmt: skip
