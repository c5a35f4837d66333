"""swiglu in Triton, for Ascend and NVIDIA. Reference: reference.py

A program loops over tiles of BR rows by BD columns. Several programs share the columns of a row, so
that a few wide rows, as in decoding, keep all cores busy.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from npu_ops.core.activations_triton_ascend import sigmoid, silu
from npu_ops.core.grid import cdiv, next_power_of_2, tile_elements, vector_grid
from npu_ops.ops.swiglu.reference import halves

# Elements per tile. Argument: on-chip bytes that the vendor's compiler reserves per fp32 element.
TILE = tile_elements(24)
BACKWARD_TILE = tile_elements(48)
WIDEST = 1024  # maximum number of columns; wide, because fewer programs start faster for few rows
NARROWEST = 64  # minimum number of columns: 128 contiguous bytes of bf16


@triton.jit
def _tile(tile, rows, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """Return the rows and columns of a tile, and which of them exist."""
    across = tl.cdiv(D, BD)
    row = (tile // across) * BR + tl.arange(0, BR)[:, None]
    column = (tile % across) * BD + tl.arange(0, BD)[None, :]
    return row.to(tl.int64), column, (row < rows) & (column < D)


@triton.jit
def _load(x, row, column, mask, step):
    """Load a tile as fp32; 0 where the mask is false."""
    return tl.load(x + row * step + column, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(x, row, column, mask, step, value):
    tl.store(x + row * step + column, value.to(x.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _swiglu_kernel(
    gate, up, out, rows, gate_step, up_step, out_step,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(rows, BR) * tl.cdiv(D, BD)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, column, mask = _tile(tile, rows, D, BR, BD)
        z = _load(gate, row, column, mask, gate_step)
        value = silu(z) * _load(up, row, column, mask, up_step)
        _store(out, row, column, mask, out_step, value)


@triton.jit(do_not_specialize=["rows"])
def _swiglu_backward_kernel(
    grad, gate, up, grad_gate, grad_up, rows, grad_step, gate_step, up_step, to_gate_step,
    to_up_step, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(rows, BR) * tl.cdiv(D, BD)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, column, mask = _tile(tile, rows, D, BR, BD)
        z = _load(gate, row, column, mask, gate_step)
        g = _load(grad, row, column, mask, grad_step)
        gated = sigmoid(z)
        value = z * gated
        _store(grad_up, row, column, mask, to_up_step, g * value)
        # For a large z, value - value * gated is only a rounding error, about 1e-7 z.
        slope = gated + (value - value * gated)
        of_gate = g * _load(up, row, column, mask, up_step) * slope
        _store(grad_gate, row, column, mask, to_gate_step, of_gate)


def swiglu(gate, up, out) -> None:
    """Write `out`. The tensors are the operator's arguments, as matrices."""
    _launch(_swiglu_kernel, (*halves(gate, up), out), TILE)


def swiglu_backward(grad, gate, up, grad_gate, grad_up) -> None:
    """Write the gradients; grad_up is None if up is None."""
    written = halves(grad_gate, grad_up)
    _launch(_swiglu_backward_kernel, (grad, *halves(gate, up), *written), BACKWARD_TILE)


def _launch(kernel, tensors, tile: int) -> None:
    """Launch `kernel` on matrices of one shape. Tiles depend on the width, never on the rows."""
    rows, width = tensors[0].shape
    bd = _columns(width)
    br = tile // bd
    steps = (tensor.stride(0) for tensor in tensors)
    kernel[vector_grid(cdiv(rows, br) * cdiv(width, bd), tensors[0].device)](
        *tensors, rows, *steps, D=width, BR=br, BD=bd
    )


def _columns(width: int) -> int:
    """Return the columns of a tile: a divisor of the width if it is at least NARROWEST.

    Otherwise return a power of two. A tile that reaches beyond the width takes three times as long.
    """
    whole = math.gcd(width, WIDEST)
    return whole if whole >= NARROWEST else min(WIDEST, max(NARROWEST, next_power_of_2(width)))
