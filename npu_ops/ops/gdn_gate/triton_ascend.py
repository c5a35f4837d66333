"""Shared by gdn_gate and gated_delta_rule_update: computes gates in Triton.

For Ascend and NVIDIA. Reference: reference.py

A program loops over tiles of BT tokens by BH heads. gated_delta_rule_update uses only `rate_of`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from npu_ops.core.grid import cdiv, next_power_of_2, tile_elements, vector_grid
from npu_ops.ops.gdn_gate.softplus import is_plain

# Elements per tile. Argument: on-chip bytes that the vendor's compiler reserves per fp32 element.
TILE = tile_elements(96)
WIDEST = 512  # maximum number of heads in a tile
NARROWEST = 16  # minimum: narrower rows would waste most of a vector instruction
# Maximum number of pieces into which the rows are cut to sum over them.
PIECES = 48


@triton.jit
def _sigmoid_and_softplus(x):
    """Return sigmoid(x) and softplus(x), computed from exp(-|x|), which cannot overflow.

    log(1 + e) = 2 artanh(s) with s = e / (2 + e) <= 1/3, by its series: log(1 + e) itself would
    lose the digits of a small e. softplus is x from 17 on, and so from torch's threshold of 20 on.
    """
    e = tl.exp(0.0 - tl.abs(x))
    s = e / (2.0 + e)
    t = s * s
    p = t * (1.0 / 13) + 1.0 / 11
    p = p * t + 1.0 / 9
    p = p * t + 1.0 / 7
    p = p * t + 1.0 / 5
    p = p * t + 1.0 / 3
    p = p * t + 1.0
    return tl.where(x >= 0, 1.0, e) / (1.0 + e), tl.maximum(x, 0.0) + 2.0 * s * p


@triton.jit
def rate_of(x, A_log, beta, threshold, PLAIN: tl.constexpr):
    """Return root, slope and plus: exp(A_log) softplus(x) is root * plus * root.

    The derivative by x is root * slope * root. softplus(x) is log(1 + exp(beta x)) / beta, or x if
    beta x is above the threshold. exp(A_log) or softplus may overflow or underflow even if their
    product does not. So for beta x below -17, where softplus is exp(beta x) / beta in fp32, root
    includes exp(beta x + 17), and plus only the rest.
    """
    bent = x if PLAIN else x * beta
    far = bent < -17.0
    root = tl.exp(0.5 * (A_log + tl.where(far, bent + 17.0, 0.0)))
    slope, plus = _sigmoid_and_softplus(tl.where(far, -17.0, bent))
    if not PLAIN:
        straight = bent > threshold
        slope, plus = tl.where(straight, 1.0, slope), tl.where(straight, x, plus / beta)
    return root, slope, plus


@triton.jit
def _sigmoid_slope(x):
    """Return the derivative of sigmoid; sigmoid(x) * (1 - sigmoid(x)) is inexact at large x."""
    e = tl.exp(0.0 - tl.abs(x))
    return e / ((1.0 + e) * (1.0 + e))


@triton.jit
def _load(pointer, row, column, stride, mask):
    """Load a tile in fp32."""
    at = row[:, None].to(tl.int64) * stride + column[None, :]
    return tl.load(pointer + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(pointer, value, row, column, stride, mask):
    at = row[:, None].to(tl.int64) * stride + column[None, :]
    tl.store(pointer + at, value.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _heads(A_log, dt_bias, column, exists, HAS_BIAS: tl.constexpr, BH: tl.constexpr):
    """Load A_log and dt_bias of a tile's heads."""
    rate = tl.load(A_log + column, mask=exists, other=0.0).to(tl.float32)
    bias = tl.zeros((BH,), tl.float32)
    if HAS_BIAS:
        bias = tl.load(dt_bias + column, mask=exists, other=0.0).to(tl.float32)
    return rate[None, :], bias[None, :]


@triton.jit(do_not_specialize=["rows"])
def _gdn_gate_kernel(
    a, A_log, dt_bias, b, g, beta, rows, heads, scale, softplus_beta, softplus_threshold,
    a_row, b_row, g_row, beta_row, HAS_BIAS: tl.constexpr, BETA: tl.constexpr,
    PLAIN: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(heads, BH)
    for tile in range(tl.program_id(0), tl.cdiv(rows, BT) * across, tl.num_programs(0)):
        row = (tile // across) * BT + tl.arange(0, BT)
        column = (tile % across) * BH + tl.arange(0, BH)
        mask = (row < rows)[:, None] & (column < heads)[None, :]
        rate, bias = _heads(A_log, dt_bias, column, column < heads, HAS_BIAS, BH)
        x = _load(a, row, column, a_row, mask) + bias
        root, _, plus = rate_of(x, rate, softplus_beta, softplus_threshold, PLAIN)
        _store(g, 0.0 - root * plus * root, row, column, g_row, mask)
        if BETA:
            slope, _ = _sigmoid_and_softplus(_load(b, row, column, b_row, mask))
            _store(beta, slope * scale, row, column, beta_row, mask)


@triton.jit(do_not_specialize=["rows", "row_tiles"])
def _gdn_gate_backward_kernel(
    grad_g, grad_beta, a, A_log, dt_bias, b, grad_a, grad_b, A_sums, bias_sums,
    rows, heads, row_tiles, scale, softplus_beta, softplus_threshold,
    gg_row, gbeta_row, a_row, b_row, ga_row, gb_row, HAS_BIAS: tl.constexpr, BETA: tl.constexpr,
    PLAIN: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Write the gradients. Each piece of `row_tiles` tiles writes a row of A_sums and bias_sums."""
    across = tl.cdiv(heads, BH)
    pieces = tl.cdiv(rows, BT * row_tiles)
    for work in range(tl.program_id(0), pieces * across, tl.num_programs(0)):
        piece = work // across
        column = (work % across) * BH + tl.arange(0, BH)
        exists = column < heads
        rate, bias = _heads(A_log, dt_bias, column, exists, HAS_BIAS, BH)
        A_sum = tl.zeros((BH,), tl.float32)
        bias_sum = tl.zeros((BH,), tl.float32)
        for tile in range(0, row_tiles):
            row = (piece * row_tiles + tile) * BT + tl.arange(0, BT)
            mask = (row < rows)[:, None] & exists[None, :]
            # x = -inf gives absent rows a root of 0. Otherwise their root could be infinite, and
            # times their gradient of 0 it would be NaN.
            x = tl.where(mask, _load(a, row, column, a_row, mask) + bias, float("-inf"))
            root, slope, plus = rate_of(x, rate, softplus_beta, softplus_threshold, PLAIN)
            grad = 0.0 - _load(grad_g, row, column, gg_row, mask)
            # In this order, no product overflows or underflows unless the result does.
            of_a = root * slope * grad * root
            _store(grad_a, of_a, row, column, ga_row, mask)
            A_sum += tl.sum(root * plus * grad * root, axis=0)
            bias_sum += tl.sum(of_a, axis=0)
            if BETA:
                slope = _sigmoid_slope(_load(b, row, column, b_row, mask))
                of_b = _load(grad_beta, row, column, gbeta_row, mask) * scale
                _store(grad_b, of_b * slope, row, column, gb_row, mask)
        at = piece.to(tl.int64) * heads + column
        tl.store(A_sums + at, A_sum, mask=exists)
        tl.store(bias_sums + at, bias_sum, mask=exists)


def gdn_gate(a, A_log, dt_bias, b, scale, softplus_beta, softplus_threshold, g, beta):
    """Write the log decay to `g`, and beta unless b is None. Arguments as in the operator."""
    rows, heads = a.shape
    bt, bh = _tile(heads)
    _gdn_gate_kernel[vector_grid(cdiv(rows, bt) * cdiv(heads, bh), a.device)](
        a, A_log, dt_bias, b, g, beta, rows, heads, scale, softplus_beta, softplus_threshold,
        a.stride(0), _stride(b), g.stride(0), _stride(beta),
        HAS_BIAS=dt_bias is not None, BETA=b is not None,
        PLAIN=is_plain(softplus_beta, softplus_threshold), BT=bt, BH=bh,
    )  # fmt: skip


def gdn_gate_backward(
    grad_g, grad_beta, a, A_log, dt_bias, b, scale, softplus_beta, softplus_threshold, grad_a,
    grad_A_log, grad_dt_bias, grad_b,
):  # fmt: skip
    """Write the gradients.

    Each piece of rows writes its sums to a separate row. So no atomics are needed, and the result
    is the same in each run.
    """
    rows, heads = a.shape
    bt, bh = _tile(heads)
    row_tiles = cdiv(cdiv(rows, bt), PIECES)
    pieces = cdiv(rows, bt * row_tiles)
    A_sums, bias_sums = a.new_empty((2, pieces, heads), dtype=torch.float32)
    _gdn_gate_backward_kernel[vector_grid(pieces * cdiv(heads, bh), a.device)](
        grad_g, grad_beta, a, A_log, dt_bias, b, grad_a, grad_b, A_sums, bias_sums,
        rows, heads, row_tiles, scale, softplus_beta, softplus_threshold, grad_g.stride(0),
        _stride(grad_beta), a.stride(0), _stride(b), grad_a.stride(0), _stride(grad_b),
        HAS_BIAS=dt_bias is not None, BETA=b is not None,
        PLAIN=is_plain(softplus_beta, softplus_threshold), BT=bt, BH=bh,
    )  # fmt: skip
    grad_A_log.copy_(A_sums.sum(0))
    grad_dt_bias.copy_(bias_sums.sum(0))


def _tile(heads: int) -> tuple[int, int]:
    """Return the tokens and heads of a tile; they depend on the model, never on the token count."""
    columns = min(WIDEST, max(NARROWEST, next_power_of_2(heads)))
    return TILE // columns, columns


def _stride(matrix) -> int:
    return 0 if matrix is None else matrix.stride(0)
