"""grouped_linear in Triton, for Ascend and NVIDIA. Reference: reference.py

Tile sizes and the order of sums are as in `linear`, so a row has the same bits as there. The tiles
of all groups are numbered in order. Program p of n reads the ends of all groups, and computes tiles
p, p + n, ...
"""

from __future__ import annotations

import triton
import triton.language as tl

from npu_ops.core import hardware
from npu_ops.core.grid import cdiv
from npu_ops.ops.grouped_linear.cpu import grouped_linear_backward
from npu_ops.ops.linear.triton_ascend import COLUMNS, ROWS, STEP_BYTES, product

__all__ = ["grouped_linear", "grouped_linear_backward"]


@triton.jit
def _fault(offs, groups, rows):
    """Return 0, or NaN if offs decrease or end beyond the rows."""
    before, wrong = 0, 0
    for group in range(groups):
        end = tl.load(offs + group)
        wrong += tl.where((end < before) | (end > rows), 1, 0)
        before = end.to(tl.int32)
    return tl.where(wrong > 0, float("nan"), 0.0)


@triton.jit(do_not_specialize=["rows", "groups"])
def _grouped_linear_kernel(
    x, weight, offs, out, rows, groups, columns, depth, x_stride, matrix_stride, weight_stride,
    out_stride, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(columns, BN)
    fault = _fault(offs, groups, rows)
    begin, seen = 0, 0  # rows and tiles of the groups before
    for group in range(groups + 1):
        end, steps = rows, 0  # rows after the last group have no products
        if group < groups:
            end = tl.minimum(tl.maximum(tl.load(offs + group).to(tl.int32), begin), rows)
            steps = depth
        matrix = weight + tl.cast(group, tl.int64) * matrix_stride
        tiles = tl.cdiv(end - begin, BM) * across
        programs = tl.num_programs(0)
        first = (tl.program_id(0) + programs - seen % programs) % programs
        for tile in range(first, tiles, programs):
            row = begin + (tile // across) * BM + tl.arange(0, BM)
            column = (tile % across) * BN + tl.arange(0, BN)
            total = product(x, matrix, row, column, end, columns, steps, x_stride, weight_stride,
                            BM, BN, BK)  # fmt: skip
            total += fault
            mask = (row < end)[:, None] & (column < columns)[None, :]
            to = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
            tl.store(to, total.to(out.dtype.element_ty), mask=mask)
        begin = end
        seen += tiles


def grouped_linear(x, weight, offs, out):
    """Write each group's rows of x times weight^T: x `[T, K]`, weight `[G, N, K]`, offs `[G]`.

    offs: the end of each group.
    """
    (rows, depth), (groups, columns, _) = x.shape, weight.shape
    tiles = (cdiv(rows, ROWS) + groups) * cdiv(columns, COLUMNS)
    grid = (min(tiles, hardware.num_cube_cores(x.device)),)
    _grouped_linear_kernel[grid](
        x, weight, offs, out, rows, groups, columns, depth, x.stride(0), weight.stride(0),
        weight.stride(1), out.stride(0), BM=ROWS, BN=COLUMNS, BK=STEP_BYTES // x.element_size(),
    )  # fmt: skip
