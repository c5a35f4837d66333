"""Shared by l2norm, causal_conv1d and chunk_gated_delta_rule: kernels in Triton.

For Ascend and NVIDIA. Definition: reference.py

A program walks over tiles of BO outer rows by BI inner ones, each of them whole: [BO, BI, BD].
"""

from __future__ import annotations

import triton
import triton.language as tl

from npu_ops.core.grid import cdiv, next_power_of_2, tile_elements, vector_grid

# Bytes that an element needs on chip at the most (fp32), by the plan of the vendor's compiler.
TILE = tile_elements(24)
BACKWARD_TILE = tile_elements(40)
# Narrower rows than this are not worth a vector instruction.
NARROWEST = 16


@triton.jit
def _offsets(outer_row, inner_row, column, outer_stride, inner_stride):
    """Where each element of a tile is, int64."""
    return outer_row.to(tl.int64) * outer_stride + inner_row.to(tl.int64) * inner_stride + column


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
    across = tl.cdiv(inner, BI)
    for tile in range(tl.program_id(0), tl.cdiv(outer, BO) * across, tl.num_programs(0)):
        o = (tile // across) * BO + tl.arange(0, BO)[:, None, None]
        i = (tile % across) * BI + tl.arange(0, BI)[None, :, None]
        d = tl.arange(0, BD)[None, None, :]
        mask = (o < outer) & (i < inner) & (d < D)
        value = tl.load(x + _offsets(o, i, d, x_outer, x_inner), mask=mask, other=0.0)
        value = normalise(value.to(tl.float32), eps)
        to = out + _offsets(o, i, d, out_outer, out_inner)
        tl.store(to, value.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["outer", "inner"])
def _l2norm_backward_kernel(
    grad, x, grad_x, outer, inner, eps,
    grad_outer, grad_inner, x_outer, x_inner, out_outer, out_inner,
    D: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(inner, BI)
    for tile in range(tl.program_id(0), tl.cdiv(outer, BO) * across, tl.num_programs(0)):
        o = (tile // across) * BO + tl.arange(0, BO)[:, None, None]
        i = (tile % across) * BI + tl.arange(0, BI)[None, :, None]
        d = tl.arange(0, BD)[None, None, :]
        mask = (o < outer) & (i < inner) & (d < D)
        value = tl.load(x + _offsets(o, i, d, x_outer, x_inner), mask=mask, other=0.0)
        value = value.to(tl.float32)
        grad_out = tl.load(grad + _offsets(o, i, d, grad_outer, grad_inner), mask=mask, other=0.0)
        grad_value = normalise_backward(grad_out.to(tl.float32), value, eps)
        to = grad_x + _offsets(o, i, d, out_outer, out_inner)
        tl.store(to, grad_value.to(grad_x.dtype.element_ty), mask=mask)


def l2norm(x, eps, out):
    """Write l2norm(x) to `out`; both are [outer, inner, D]."""
    _launch(_l2norm_kernel, (x, out), eps, TILE)


def l2norm_backward(grad, x, eps, grad_x):
    """Write the gradient of x to `grad_x`; all are [outer, inner, D]."""
    _launch(_l2norm_backward_kernel, (grad, x, grad_x), eps, BACKWARD_TILE)


def _launch(kernel, tensors, eps, tile):
    outer, inner, width = tensors[0].shape
    padded = max(NARROWEST, next_power_of_2(width))
    fits = max(1, tile // padded)  # rows in a tile
    bi = min(fits, next_power_of_2(inner))
    bo = fits // bi
    strides = (stride for tensor in tensors for stride in tensor.stride()[:2])
    kernel[vector_grid(cdiv(outer, bo) * cdiv(inner, bi), tensors[0].device)](
        *tensors, outer, inner, eps, *strides, D=width, BO=bo, BI=bi, BD=padded
    )
