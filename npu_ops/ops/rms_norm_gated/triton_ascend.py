"""rms_norm_gated in Triton, for Ascend and NVIDIA. Reference: reference.py

A program loops over tiles of BO outer by BI inner whole rows: [BO, BI, BD]. The `_wide` kernels are
for rows that do not fit on chip. They read a row twice, in blocks of BD columns. If each inner
index is a group with its own weights, a tile has one inner index.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from npu_ops.core.activations_triton_ascend import sigmoid, silu
from npu_ops.core.grid import cdiv, next_power_of_2, tile_elements, vector_grid

# Elements per tile. Argument: on-chip bytes that the vendor's compiler reserves per fp32 element.
TILE = tile_elements(48)
BACKWARD_TILE = tile_elements(96)
WIDE_BLOCK = 1024  # columns per block of a row that does not fit
NARROWEST = 16  # minimum: narrower rows would waste most of a vector instruction
# Maximum number of pieces into which the rows are cut to sum over them.
PIECES = 48


@triton.jit
def _activate(z, SILU: tl.constexpr):
    """Return silu or sigmoid and its derivative. No infinite exponential reaches the results."""
    if SILU:
        s = sigmoid(z)
        gate = z * s
        slope = s * (z - gate + 1.0)
    else:  # 1 - sigmoid(z) would cancel
        e = tl.exp(0.0 - tl.abs(z))
        gate = tl.where(z >= 0, 1.0, e) / (1.0 + e)
        slope = e / ((1.0 + e) * (1.0 + e))
    return gate, slope


@triton.jit
def _gate(z, SILU: tl.constexpr):
    """Return silu or sigmoid without the derivative."""
    return silu(z) if SILU else sigmoid(z)


@triton.jit
def _load(pointer, offset, mask):
    return tl.load(pointer + offset, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(pointer, offset, value, mask):
    tl.store(pointer + offset, value.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _offsets(outer_row, inner_row, column, outer_stride, inner_stride):
    """Return the offset of each element of a tile, int64."""
    return outer_row.to(tl.int64) * outer_stride + inner_row.to(tl.int64) * inner_stride + column


@triton.jit(do_not_specialize=["outer", "inner"])
def _rms_norm_gated_kernel(
    x, weight, z, out, outer, inner, eps, weight_inner,
    x_outer, x_inner, z_outer, z_inner, out_outer, out_inner,
    BEFORE: tl.constexpr, SILU: tl.constexpr, GROUPED: tl.constexpr,
    D: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write the norms. If GROUPED, BI is 1 and weight_inner is the stride of an inner index."""
    across = tl.cdiv(inner, BI)
    d = tl.arange(0, BD)[None, None, :]
    w = _load(weight, d, d < D)
    for tile in range(tl.program_id(0), tl.cdiv(outer, BO) * across, tl.num_programs(0)):
        o = (tile // across) * BO + tl.arange(0, BO)[:, None, None]
        i = (tile % across) * BI + tl.arange(0, BI)[None, :, None]
        mask = (o < outer) & (i < inner) & (d < D)
        if GROUPED:
            w = _load(weight, (tile % across) * weight_inner + d, d < D)
        u = _load(x, _offsets(o, i, d, x_outer, x_inner), mask)
        gate = _gate(_load(z, _offsets(o, i, d, z_outer, z_inner), mask), SILU)
        if not BEFORE:
            u = u * gate
        r = 1.0 / tl.sqrt(tl.sum(u * u, axis=2) / D + eps)
        y = u * r[:, :, None] * w
        if BEFORE:
            y = y * gate
        _store(out, _offsets(o, i, d, out_outer, out_inner), y, mask)


@triton.jit
def _gradients(grad, x, w, gate, slope, r, along, BEFORE: tl.constexpr):
    """Return the gradients of x and z, and the terms of weight's gradient; see reference.py."""
    if BEFORE:
        of_weight = grad * (x * r)
        of_x = r * (grad * w * gate - x * along)
        of_z = of_weight * w * slope
        of_weight = of_weight * gate
    else:
        u = x * gate
        of_u = r * (grad * w - u * along)
        of_weight = grad * (u * r)
        of_x = of_u * gate
        of_z = of_u * x * slope
    return of_x, of_z, of_weight


@triton.jit
def _normalised(grad, x, w, gate, BEFORE: tl.constexpr):
    """Return the value that is normalised, and the gradient of its normalised form."""
    if BEFORE:
        u = x
        grad_n = grad * w * gate
    else:
        u = x * gate
        grad_n = grad * w
    return u, grad_n


@triton.jit(do_not_specialize=["outer", "members", "piece_tiles"])
def _rms_norm_gated_backward_kernel(
    grad, x, weight, z, grad_x, grad_z, sums, outer, members, groups, piece_tiles, eps,
    g_outer, g_inner, x_outer, x_inner, z_outer, z_inner, gx_outer, gx_inner, gz_outer, gz_inner,
    BEFORE: tl.constexpr, SILU: tl.constexpr,
    D: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute grad_x and grad_z, and partial sums of the weight's gradient.

    A work item is `piece_tiles` tiles whose rows share one group of weights. It writes one row of
    `sums`. members: number of inner indices that share a group of weights: all of them, or one.
    """
    across = tl.cdiv(members, BI)
    pieces = tl.cdiv(tl.cdiv(outer, BO) * across, piece_tiles)
    d = tl.arange(0, BD)
    for work in range(tl.program_id(0), pieces * groups, tl.num_programs(0)):
        piece, group = work // groups, work % groups
        w = _load(weight, group * D + d, d < D)[None, None, :]
        total = tl.zeros((BD,), tl.float32)
        for step in range(0, piece_tiles):
            tile = piece * piece_tiles + step
            o = (tile // across) * BO + tl.arange(0, BO)[:, None, None]
            member = (tile % across) * BI + tl.arange(0, BI)[None, :, None]
            i, c = group + member, d[None, None, :]
            exists = (o < outer) & (member < members)
            mask = exists & (c < D)
            g = _load(grad, _offsets(o, i, c, g_outer, g_inner), mask)
            value = _load(x, _offsets(o, i, c, x_outer, x_inner), mask)
            z_value = _load(z, _offsets(o, i, c, z_outer, z_inner), mask)
            gate, slope = _activate(z_value, SILU)
            u, grad_n = _normalised(g, value, w, gate, BEFORE)
            r = (1.0 / tl.sqrt(tl.sum(u * u, axis=2) / D + eps))[:, :, None]
            r = tl.where(exists, r, 0.0)  # where there is no row, r is infinite if eps is 0
            along = r * (r * (tl.sum(grad_n * u, axis=2) / D)[:, :, None])
            of_x, of_z, of_weight = _gradients(g, value, w, gate, slope, r, along, BEFORE)
            _store(grad_x, _offsets(o, i, c, gx_outer, gx_inner), of_x, mask)
            _store(grad_z, _offsets(o, i, c, gz_outer, gz_inner), of_z, mask)
            total += tl.sum(tl.reshape(of_weight, (BO * BI, BD)), axis=0)
        at = (piece * groups + group).to(tl.int64) * D
        tl.store(sums + at + d, total, mask=d < D)


@triton.jit(do_not_specialize=["outer", "inner"])
def _rms_norm_gated_wide_kernel(
    x, weight, z, out, outer, inner, eps, weight_inner,
    x_outer, x_inner, z_outer, z_inner, out_outer, out_inner,
    BEFORE: tl.constexpr, SILU: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    for row in range(tl.program_id(0), outer * inner, tl.num_programs(0)):
        o, i = row // inner, row % inner
        squares = tl.zeros((BD,), tl.float32)
        for start in range(0, D, BD):
            d = start + tl.arange(0, BD)
            u = _load(x, _offsets(o, i, d, x_outer, x_inner), d < D)
            if not BEFORE:
                u = u * _gate(_load(z, _offsets(o, i, d, z_outer, z_inner), d < D), SILU)
            squares += u * u
        r = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / D + eps)
        for start in range(0, D, BD):
            d = start + tl.arange(0, BD)
            u = _load(x, _offsets(o, i, d, x_outer, x_inner), d < D)
            gate = _gate(_load(z, _offsets(o, i, d, z_outer, z_inner), d < D), SILU)
            y = u * gate * r * _load(weight, i * weight_inner + d, d < D)
            _store(out, _offsets(o, i, d, out_outer, out_inner), y, d < D)


@triton.jit(do_not_specialize=["outer", "inner"])
def _rms_norm_gated_wide_backward_kernel(
    grad, x, weight, z, grad_x, grad_z, reciprocals, outer, inner, eps, weight_inner,
    g_outer, g_inner, x_outer, x_inner, z_outer, z_inner, gx_outer, gx_inner, gz_outer, gz_inner,
    BEFORE: tl.constexpr, SILU: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write the gradients of x and z, and each row's reciprocal RMS for the gradient of weight."""
    for row in range(tl.program_id(0), outer * inner, tl.num_programs(0)):
        o, i = row // inner, row % inner
        squares = tl.zeros((BD,), tl.float32)
        dots = tl.zeros((BD,), tl.float32)
        for start in range(0, D, BD):
            d = start + tl.arange(0, BD)
            w = _load(weight, i * weight_inner + d, d < D)
            g = _load(grad, _offsets(o, i, d, g_outer, g_inner), d < D)
            value = _load(x, _offsets(o, i, d, x_outer, x_inner), d < D)
            gate = _gate(_load(z, _offsets(o, i, d, z_outer, z_inner), d < D), SILU)
            u, grad_n = _normalised(g, value, w, gate, BEFORE)
            squares += u * u
            dots += grad_n * u
        r = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / D + eps)
        along = r * (r * (tl.sum(dots, axis=0) / D))
        tl.store(reciprocals + row, r)
        for start in range(0, D, BD):
            d = start + tl.arange(0, BD)
            w = _load(weight, i * weight_inner + d, d < D)
            g = _load(grad, _offsets(o, i, d, g_outer, g_inner), d < D)
            value = _load(x, _offsets(o, i, d, x_outer, x_inner), d < D)
            z_value = _load(z, _offsets(o, i, d, z_outer, z_inner), d < D)
            gate, slope = _activate(z_value, SILU)
            of_x, of_z, _ = _gradients(g, value, w, gate, slope, r, along, BEFORE)
            _store(grad_x, _offsets(o, i, d, gx_outer, gx_inner), of_x, d < D)
            _store(grad_z, _offsets(o, i, d, gz_outer, gz_inner), of_z, d < D)


@triton.jit(do_not_specialize=["outer", "members", "piece_rows"])
def _rms_norm_gated_wide_weight_kernel(
    grad, x, z, reciprocals, sums, outer, members, groups, piece_rows,
    g_outer, g_inner, x_outer, x_inner, z_outer, z_inner,
    SILU: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Sum the gradient of weight over BD columns of `piece_rows` rows of one group of weights."""
    rows = outer * members
    across = tl.cdiv(D, BD)
    pieces = tl.cdiv(rows, piece_rows)
    for work in range(tl.program_id(0), pieces * groups * across, tl.num_programs(0)):
        d = (work % across) * BD + tl.arange(0, BD)
        piece, group = work // across // groups, (work // across) % groups
        total = tl.zeros((BD,), tl.float32)
        for step in range(0, piece_rows):
            row = piece * piece_rows + step
            o, i = row // members, group + row % members
            mask = (d < D) & (row < rows)
            r = tl.load(reciprocals + row * groups + group, mask=row < rows, other=0.0)
            g = _load(grad, _offsets(o, i, d, g_outer, g_inner), mask)
            value = _load(x, _offsets(o, i, d, x_outer, x_inner), mask)
            gate = _gate(_load(z, _offsets(o, i, d, z_outer, z_inner), mask), SILU)
            total += g * value * gate * r  # the same formula for both orders of norm and gate
        at = (piece * groups + group).to(tl.int64) * D
        tl.store(sums + at + d, total, mask=d < D)


def rms_norm_gated(x, weight, z, eps, norm_before_gate, activation, out):
    """Write the result to `out`. Arguments as in the operator."""
    outer, inner, width = x.shape
    grouped = weight.shape[0] > 1
    constants = {"BEFORE": norm_before_gate, "SILU": activation == "silu", "D": width}
    arguments = (
        x, weight, z, out, outer, inner, eps, width if grouped else 0, *_strides(x, z, out)
    )  # fmt: skip
    tile = _tile(TILE, inner, width, grouped)
    if tile is None:
        grid = vector_grid(outer * inner, x.device)
        _rms_norm_gated_wide_kernel[grid](*arguments, **constants, BD=WIDE_BLOCK)
    else:
        grid = vector_grid(cdiv(outer, tile["BO"]) * cdiv(inner, tile["BI"]), x.device)
        _rms_norm_gated_kernel[grid](*arguments, GROUPED=grouped, **constants, **tile)


def rms_norm_gated_backward(
    grad, x, weight, z, eps, norm_before_gate, activation, grad_x, grad_weight, grad_z
):
    """Write the gradients.

    Each piece writes its sums over rows to a row of its own. So no atomics are needed, and the
    result is the same each time.
    """
    outer, inner, width = x.shape
    groups = weight.shape[0]
    constants = {"BEFORE": norm_before_gate, "SILU": activation == "silu", "D": width}
    tile = _tile(BACKWARD_TILE, inner, width, groups > 1)
    if tile is None:
        _wide_backward(grad, x, weight, z, eps, constants, grad_x, grad_weight, grad_z)
        return
    members = inner // groups
    tiles = cdiv(outer, tile["BO"]) * cdiv(members, tile["BI"])
    piece_tiles = cdiv(tiles, PIECES)
    pieces = cdiv(tiles, piece_tiles)
    sums = x.new_empty((pieces, groups, width), dtype=torch.float32)
    _rms_norm_gated_backward_kernel[vector_grid(pieces * groups, x.device)](
        grad, x, weight, z, grad_x, grad_z, sums, outer, members, groups, piece_tiles, eps,
        *_strides(grad, x, z, grad_x, grad_z), **constants, **tile,
    )  # fmt: skip
    grad_weight.copy_(sums.sum(0))


def _wide_backward(grad, x, weight, z, eps, constants, grad_x, grad_weight, grad_z):
    outer, inner, width = x.shape
    groups = weight.shape[0]
    members = inner // groups
    reciprocals = x.new_empty(outer * inner, dtype=torch.float32)
    _rms_norm_gated_wide_backward_kernel[vector_grid(outer * inner, x.device)](
        grad, x, weight, z, grad_x, grad_z, reciprocals, outer, inner, eps,
        width if groups > 1 else 0, *_strides(grad, x, z, grad_x, grad_z), **constants,
        BD=WIDE_BLOCK,
    )  # fmt: skip
    piece_rows = cdiv(outer * members, PIECES)
    pieces = cdiv(outer * members, piece_rows)
    sums = x.new_empty((pieces, groups, width), dtype=torch.float32)
    grid = vector_grid(pieces * groups * cdiv(width, WIDE_BLOCK), x.device)
    _rms_norm_gated_wide_weight_kernel[grid](
        grad, x, z, reciprocals, sums, outer, members, groups, piece_rows, *_strides(grad, x, z),
        SILU=constants["SILU"], D=width, BD=WIDE_BLOCK,
    )  # fmt: skip
    grad_weight.copy_(sums.sum(0))


def _tile(elements: int, inner: int, width: int, grouped: bool) -> dict | None:
    """Return the shape of a tile of up to `elements` elements, or None if a row does not fit."""
    padded = max(NARROWEST, next_power_of_2(width))
    if padded > elements:
        return None
    fits = elements // padded
    inner_rows = 1 if grouped else min(fits, next_power_of_2(inner))
    return {"BO": fits // inner_rows, "BI": inner_rows, "BD": padded}


def _strides(*tensors):
    return (stride for tensor in tensors for stride in tensor.stride()[:2])
