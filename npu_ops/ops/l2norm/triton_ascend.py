"""Shared by l2norm, causal_conv1d and chunk_gated_delta_rule: kernels in Triton.

For Ascend and NVIDIA. Definition: reference.py

A program walks over tiles of BO outer rows by BI inner ones, each of them whole: [BO, BI, BD].
"""

from __future__ import annotations

import triton
import triton.language as tl

from npu_ops.core.grid import tile_elements
from npu_ops.core.rows_triton_ascend import launch_rows, load_row, row_tiles, rows_of, store_row

# Bytes that an element needs on chip at the most (fp32), by the plan of the vendor's compiler.
TILE = tile_elements(24)
BACKWARD_TILE = tile_elements(40)


@triton.jit
def _reciprocal_norm(x, eps):
    """fp32 [BO, BI, 1]."""
    return (1.0 / tl.sqrt(tl.sum(x * x, axis=2) + eps))[:, :, None]


@triton.jit
def normalise(value, eps):
    """Rows of a tile, fp32 [BO, BI, BD], over their norm."""
    return value * _reciprocal_norm(value, eps)


@triton.jit
def normalise_backward(grad, value, eps):
    """The gradient of `value`; `grad` is that of its rows over their norm."""
    rstd = _reciprocal_norm(value, eps)
    value = value * rstd
    along = tl.sum(grad * value, axis=2)[:, :, None]
    return rstd * (grad - value * along)


@triton.jit(do_not_specialize=["outer", "inner"])
def _l2norm_kernel(
    x, out, outer, inner, eps, x_outer, x_inner, out_outer, out_inner,
    D: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    for tile in range(tl.program_id(0), row_tiles(outer, inner, BO, BI), tl.num_programs(0)):
        o, i, d, mask = rows_of(tile, outer, inner, D, BO, BI, BD)
        value = load_row(x, o, i, d, mask, x_outer, x_inner)
        store_row(out, o, i, d, mask, out_outer, out_inner, normalise(value, eps))


@triton.jit(do_not_specialize=["outer", "inner"])
def _l2norm_backward_kernel(
    grad, x, grad_x, outer, inner, eps,
    grad_outer, grad_inner, x_outer, x_inner, out_outer, out_inner,
    D: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    for tile in range(tl.program_id(0), row_tiles(outer, inner, BO, BI), tl.num_programs(0)):
        o, i, d, mask = rows_of(tile, outer, inner, D, BO, BI, BD)
        value = load_row(x, o, i, d, mask, x_outer, x_inner)
        grad_out = load_row(grad, o, i, d, mask, grad_outer, grad_inner)
        grad_value = normalise_backward(grad_out, value, eps)
        store_row(grad_x, o, i, d, mask, out_outer, out_inner, grad_value)


def l2norm(x, eps, out):
    """Write l2norm(x) to `out`; both are [outer, inner, D]."""
    launch_rows(_l2norm_kernel, (x, out), TILE, eps)


def l2norm_backward(grad, x, eps, grad_x):
    """Write the gradient of x to `grad_x`; all are [outer, inner, D]."""
    launch_rows(_l2norm_backward_kernel, (grad, x, grad_x), BACKWARD_TILE, eps)
