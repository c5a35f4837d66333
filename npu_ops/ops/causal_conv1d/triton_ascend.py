"""Shared by causal_conv1d, causal_conv1d_qkv and causal_conv1d_update: convolution in Triton.

For Ascend and NVIDIA. Reference: reference.py

A piece of work is a run of tokens and a block of BD channels. A program loops over the tokens and
keeps on chip the rows that the filter still needs. So each row is read once, not once per tap. In
names, a number counts tokens back: x1 is the row before x0, and w1 the tap that multiplies it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from npu_ops.core import hardware
from npu_ops.core.activations_triton_ascend import sigmoid, silu
from npu_ops.core.grid import cdiv, next_power_of_2, tile_elements, vector_grid
from npu_ops.core.lengths_triton_ascend import finish, int32_starts
from npu_ops.ops.causal_conv1d import wide_triton_ascend as wide
from npu_ops.ops.causal_conv1d.starts_triton_ascend import bounds_of, piece_of
from npu_ops.ops.l2norm.triton_ascend import normalise, normalise_backward

# Channels in a block, from the bytes that the vendor's compiler reserves on chip for each channel
# (fp32, W = 4): filter, rows before, the row itself; in the backward also sums and gradients.
BLOCK = tile_elements(96)
BACKWARD_BLOCK = tile_elements(192)
# The fewest tokens of a piece: each piece also reads W - 1 rows of the piece before it.
SHORTEST = 32
# Tokens per iteration. `x3, x2, x1 = x2, x1, x0` copies half as many vectors per token as with one
# token per iteration. With four, the unified buffer is full, so rows are not loaded ahead.
UNROLLED = 2
# Starts of sequences that are compared at a time.
STARTS = 1024


@triton.jit
def load_row(row, column, limit):
    """Load channels `column` of a row as fp32, zero from `limit` on."""
    return tl.load(row + column, mask=column < limit, other=0.0).to(tl.float32)


@triton.jit
def load_taps(taps, column, width, edge, W: tl.constexpr):
    """Load the filter `[W, width]` as one vector per tap, zero from `edge` on.

    Its last row is the tap of the current token, w0.
    """
    w0 = load_row(taps + (W - 1) * width, column, edge)
    w1 = load_row(taps + (W - 2) * width, column, edge)
    w2 = load_row(taps + (W - 3) * width, column, edge) if W > 2 else w0
    w3 = load_row(taps, column, edge) if W > 3 else w0
    return w0, w1, w2, w3


@triton.jit
def convolve(x0, x1, x2, x3, w0, w1, w2, w3, W: tl.constexpr):
    """Return one row of the convolution, without bias and activation."""
    z = x0 * w0 + x1 * w1
    if W > 2:
        z += x2 * w2
    if W > 3:
        z += x3 * w3
    return z


@triton.jit
def _row_before(x, state, t, start, column, width, x_t, state_w, W: tl.constexpr,
                STATE: tl.constexpr):  # fmt: skip
    """Load row t of a sequence, or a row of its state if t is before `start`; fp32 [BD]."""
    row = load_row(x + tl.cast(t, tl.int64) * x_t, column, tl.where(t >= start, width, 0))
    if STATE:
        at = tl.cast(W + t - start, tl.int64) * state_w
        row += load_row(state + at, column, tl.where(t < start, width, 0))
    return row


@triton.jit
def _rows_before(x, state, t, start, column, width, x_t, state_w, W: tl.constexpr,
                 STATE: tl.constexpr):  # fmt: skip
    """Load the three rows before row t; a filter with fewer than 4 taps needs fewer."""
    x1 = _row_before(x, state, t - 1, start, column, width, x_t, state_w, W, STATE)
    x2, x3 = x1, x1
    if W > 2:
        x2 = _row_before(x, state, t - 2, start, column, width, x_t, state_w, W, STATE)
    if W > 3:
        x3 = _row_before(x, state, t - 3, start, column, width, x_t, state_w, W, STATE)
    return x1, x2, x3


@triton.jit
def _unit(y, eps, HEAD: tl.constexpr):
    """Divide each group of HEAD channels of a row by its norm."""
    heads = tl.reshape(y, (1, y.shape[0] // HEAD, HEAD))
    return tl.reshape(normalise(heads, eps), (y.shape[0],))


@triton.jit
def _unit_backward(grad, y, eps, HEAD: tl.constexpr):
    """Return the gradient of `_unit`'s y."""
    shape: tl.constexpr = (1, y.shape[0] // HEAD, HEAD)
    grad_y = normalise_backward(tl.reshape(grad, shape), tl.reshape(y, shape), eps)
    return tl.reshape(grad_y, (y.shape[0],))


@triton.jit
def convolve_channels(
    x, taps, bias, residual, state, cu_seqlens, y, left, right, eps, batch, sequences, length,
    chunk, width, x_b, x_t, residual_b, residual_t, state_n, state_w, y_b, y_t,
    W: tl.constexpr, SILU: tl.constexpr, HEAD: tl.constexpr, BD: tl.constexpr, STEP: tl.constexpr,
    UNROLLED: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    """Compute this program's share of channels [left, right) of x. y has these channels only.

    A block is STEP channels in BD lanes. Unless HEAD is 0, groups of HEAD channels are normalised.
    """
    blocks = tl.cdiv(right - left, STEP)
    items = batch * tl.cdiv(length, chunk) * blocks
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        b, first, last, n_first, n_last = piece_of(
            item, cu_seqlens, sequences, length, chunk, blocks, cu_seqlens is not None, STARTS
        )
        column = left + (item % blocks) * STEP + tl.arange(0, BD)
        edge = tl.minimum(left + (item % blocks) * STEP + STEP, right)
        x_at, y_at, residual_at = x + b * x_b, y + b * y_b - left, residual
        if residual is not None:
            residual_at = residual + b * residual_b
        w0, w1, w2, w3 = load_taps(taps, column, width, edge, W)
        if bias is not None:
            offset = load_row(bias, column, edge)
        for n in range(n_first, n_last + 1):
            start, stop = bounds_of(cu_seqlens, n, length, cu_seqlens is not None)
            begin, end = tl.maximum(first, start), tl.minimum(last, stop)
            state_at = state
            if state is not None:
                state_at = state + tl.cast(n, tl.int64) * state_n
            x1, x2, x3 = _rows_before(x_at, state_at, begin, start, column, edge, x_t, state_w, W,
                                      state is not None)  # fmt: skip
            for turn in range(begin, end, UNROLLED):
                for step in tl.static_range(UNROLLED):
                    t = tl.cast(turn + step, tl.int64)
                    limit = tl.where(turn + step < end, edge, 0)
                    x0 = load_row(x_at + t * x_t, column, limit)
                    z = convolve(x0, x1, x2, x3, w0, w1, w2, w3, W)
                    if bias is not None:
                        z += offset
                    if SILU:
                        z = silu(z)
                    if HEAD:
                        z = _unit(z, eps, HEAD)
                    if residual is not None:
                        z += load_row(residual_at + t * residual_t, column, limit)
                    out = z.to(y.dtype.element_ty)
                    tl.store(y_at + t * y_t + column, out, mask=column < limit)
                    x3, x2, x1 = x2, x1, x0


@triton.jit(do_not_specialize=["batch", "sequences", "length", "chunk"])
def _causal_conv1d_kernel(
    x, taps, bias, residual, state, cu_seqlens, y, batch, sequences, length, chunk, width,
    x_b, x_t, residual_b, residual_t, state_n, state_w, y_b, y_t,
    W: tl.constexpr, SILU: tl.constexpr, BD: tl.constexpr, UNROLLED: tl.constexpr,
    STARTS: tl.constexpr,
):  # fmt: skip
    convolve_channels(
        x, taps, bias, residual, state, cu_seqlens, y, 0, width, 0.0, batch, sequences, length,
        chunk, width, x_b, x_t, residual_b, residual_t, state_n, state_w, y_b, y_t,
        W, SILU, 0, BD, BD, UNROLLED, STARTS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["items", "length"])
def _final_state_kernel(
    x, state, cu_seqlens, final_state, items, length, width, blocks, x_b, x_t, state_n, state_w,
    final_n, final_w, W: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write the last W rows of each sequence."""
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        n = item // blocks
        column = (item % blocks) * BD + tl.arange(0, BD)
        start, stop = bounds_of(cu_seqlens, n, length, cu_seqlens is not None)
        x_at, state_at = x, state
        if cu_seqlens is None:
            x_at = x + tl.cast(n, tl.int64) * x_b
        if state is not None:
            state_at = state + tl.cast(n, tl.int64) * state_n
        for k in tl.static_range(W):
            t = stop - W + k
            row = _row_before(x_at, state_at, t, start, column, width, x_t, state_w, W,
                              state is not None)  # fmt: skip
            to = final_state + tl.cast(n, tl.int64) * final_n + k * final_w + column
            tl.store(to, row.to(final_state.dtype.element_ty), mask=column < width)


def causal_conv1d(x, weight, bias, residual, initial_state, cu_seqlens, silu, y, final_state):
    """Write y, and the final state unless it is None. Arguments as in the operator."""
    batch, length, width = x.shape
    block = min(BLOCK, next_power_of_2(width))
    blocks = cdiv(width, block)
    chunk = tokens_of_a_piece(batch, length, blocks, x.device)
    items = batch * cdiv(length, chunk) * blocks
    starts = int32_starts(cu_seqlens)
    if weight.shape[1] > 4:
        call = wide.Call(x, weight.shape[1], starts, chunk, STARTS)
        taps = taps_first(weight)
        wide.forward(call, x, taps, bias, residual, initial_state, silu, y, strides)
    else:
        sequences = batch if starts is None else len(starts) - 1
        _causal_conv1d_kernel[vector_grid(items, x.device)](
            x, taps_first(weight), bias, residual, initial_state, starts, y, batch, sequences,
            length, chunk, width, *x.stride()[:2], *strides(residual, 0, 1),
            *strides(initial_state, 0, 2), *y.stride()[:2], W=weight.shape[1], SILU=silu, BD=block,
            UNROLLED=UNROLLED, STARTS=STARTS,
        )  # fmt: skip
    write_final_state(x, initial_state, starts, final_state)
    finish(starts, y, states=(final_state,))


def write_final_state(x, initial_state, starts, final_state):
    """Write the last rows of each sequence, unless `final_state` is None."""
    if final_state is None:
        return
    sequences, width, taps = final_state.shape
    block = min(BLOCK, next_power_of_2(width))
    blocks = cdiv(width, block)
    items = sequences * blocks
    _final_state_kernel[vector_grid(items, x.device)](
        x, initial_state, starts, final_state, items, x.shape[1], width, blocks, *x.stride()[:2],
        *strides(initial_state, 0, 2), *strides(final_state, 0, 2), W=taps, BD=block,
    )  # fmt: skip


@triton.jit
def convolve_channels_backward(
    grad, grad_final, x, taps, bias, state, cu_seqlens, grad_x, grad_state, sums,
    left, right, eps, batch, sequences, length, chunk, width,
    grad_b, grad_t, final_n, final_w, x_b, x_t, state_n, state_w, grad_x_b, grad_x_t,
    grad_state_n, grad_state_w,
    W: tl.constexpr, SILU: tl.constexpr, HEAD: tl.constexpr, BD: tl.constexpr, STEP: tl.constexpr,
    UNROLLED: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of channels [left, right) of x and state.

    Each piece also writes its share of the gradients of taps and bias to `sums`.

    Let g be the gradient of the convolution's output. The gradient of row p needs g of the rows p
    to p + W - 1, so the loop writes it at row t = p + W - 1. The loop therefore ends W - 1 rows
    behind the piece. At the start of a sequence, the first W - 1 rows p are rows of the state.
    """
    blocks = tl.cdiv(right - left, STEP)
    items = batch * tl.cdiv(length, chunk) * blocks
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        b, first, last, n_first, n_last = piece_of(
            item, cu_seqlens, sequences, length, chunk, blocks, cu_seqlens is not None, STARTS
        )
        column = left + (item % blocks) * STEP + tl.arange(0, BD)
        edge = tl.minimum(left + (item % blocks) * STEP + STEP, right)
        grad_at, x_at, grad_x_at = grad + b * grad_b - left, x + b * x_b, grad_x + b * grad_x_b
        w0, w1, w2, w3 = load_taps(taps, column, width, edge, W)
        if bias is not None:
            offset = load_row(bias, column, edge)
        zero = tl.zeros((BD,), tl.float32)
        sum0, sum1, sum2, sum3, sum_bias = zero, zero, zero, zero, zero
        for n in range(n_first, n_last + 1):
            start, stop = bounds_of(cu_seqlens, n, length, cu_seqlens is not None)
            begin, end = tl.maximum(first, start), tl.minimum(last, stop)
            state_at = state
            if state is not None:
                state_at = state + tl.cast(n, tl.int64) * state_n
            x1, x2, x3 = _rows_before(x_at, state_at, begin, start, column, edge, x_t, state_w, W,
                                      state is not None)  # fmt: skip
            # Create three separate zeros. If the names shared one value, Triton 3.6 would treat
            # those that the loop only passes on as loop invariants.
            g1, g2 = tl.zeros((BD,), tl.float32), tl.zeros((BD,), tl.float32)
            g3 = tl.zeros((BD,), tl.float32)
            walk_end = tl.where(begin < end, end + W - 1, begin)
            for turn in range(begin, walk_end, UNROLLED):
                for step in tl.static_range(UNROLLED):
                    row = turn + step
                    t = tl.cast(row, tl.int64)
                    limit = tl.where(row < stop, edge, 0)
                    x0 = load_row(x_at + t * x_t, column, limit)
                    g0 = load_row(grad_at + t * grad_t, column, limit)
                    if SILU or HEAD:
                        z = convolve(x0, x1, x2, x3, w0, w1, w2, w3, W)
                        if bias is not None:
                            z += offset
                        gate = sigmoid(z) if SILU else 1.0
                        if HEAD:
                            g0 = _unit_backward(g0, z * gate, eps, HEAD)
                        if SILU:
                            g0 = g0 * gate * (1.0 + z * (1.0 - gate))
                    own = g0 * tl.where(row < end, 1.0, 0.0)
                    if bias is not None:
                        sum_bias += own
                    sum0 += own * x0
                    sum1 += own * x1
                    p = row - (W - 1)
                    # Reverse order: the oldest g is that of row p, which the tap w0 multiplied.
                    if W == 2:
                        value = convolve(g1, g0, g0, g0, w0, w1, w1, w1, W)
                    elif W == 3:
                        sum2 += own * x2
                        value = convolve(g2, g1, g0, g0, w0, w1, w2, w2, W)
                    else:
                        sum2 += own * x2
                        sum3 += own * x3
                        value = convolve(g3, g2, g1, g0, w0, w1, w2, w3, W)
                    if grad_final is not None:
                        k = p - (stop - W)
                        at = tl.cast(n, tl.int64) * final_n + tl.cast(k, tl.int64) * final_w
                        limit = tl.where((k >= 0) & (k < W), edge, 0)
                        value += load_row(grad_final + at, column, limit)
                    limit = tl.where((p >= begin) & (p < end), edge, 0)
                    to = grad_x_at + tl.cast(p, tl.int64) * grad_x_t + column
                    tl.store(to, value.to(grad_x.dtype.element_ty), mask=column < limit)
                    if grad_state is not None:
                        limit = tl.where((p < begin) & (begin == start), edge, 0)
                        at = tl.cast(W + p - start, tl.int64) * grad_state_w
                        to = grad_state + tl.cast(n, tl.int64) * grad_state_n + at + column
                        tl.store(to, value.to(grad_state.dtype.element_ty), mask=column < limit)
                    x3, x2, x1 = x2, x1, x0
                    g3, g2, g1 = g2, g1, g0
        to = sums + tl.cast(item // blocks, tl.int64) * (W + 1) * width + column
        tl.store(to, sum_bias, mask=column < edge)
        tl.store(to + W * width, sum0, mask=column < edge)
        tl.store(to + (W - 1) * width, sum1, mask=column < edge)
        if W > 2:
            tl.store(to + (W - 2) * width, sum2, mask=column < edge)
        if W > 3:
            tl.store(to + (W - 3) * width, sum3, mask=column < edge)


@triton.jit(do_not_specialize=["batch", "sequences", "length", "chunk"])
def _causal_conv1d_backward_kernel(
    grad, grad_final, x, taps, bias, state, cu_seqlens, grad_x, grad_state, sums,
    batch, sequences, length, chunk, width,
    grad_b, grad_t, final_n, final_w, x_b, x_t, state_n, state_w, grad_x_b, grad_x_t,
    grad_state_n, grad_state_w,
    W: tl.constexpr, SILU: tl.constexpr, BD: tl.constexpr, UNROLLED: tl.constexpr,
    STARTS: tl.constexpr,
):  # fmt: skip
    convolve_channels_backward(
        grad, grad_final, x, taps, bias, state, cu_seqlens, grad_x, grad_state, sums,
        0, width, 0.0, batch, sequences, length, chunk, width,
        grad_b, grad_t, final_n, final_w, x_b, x_t, state_n, state_w, grad_x_b, grad_x_t,
        grad_state_n, grad_state_w, W, SILU, 0, BD, BD, UNROLLED, STARTS,
    )  # fmt: skip


def causal_conv1d_backward(
    grad_y, grad_final_state, x, weight, bias, initial_state, cu_seqlens, silu,
    grad_x, grad_weight, grad_bias, grad_initial_state,
):  # fmt: skip
    """Write the gradients; grad_bias and grad_initial_state may be None."""
    batch, length, width = x.shape
    taps = weight.shape[1]
    block = min(BACKWARD_BLOCK, next_power_of_2(width))
    blocks = cdiv(width, block)
    chunk = tokens_of_a_piece(batch, length, blocks, x.device)
    pieces = batch * cdiv(length, chunk)
    starts = int32_starts(cu_seqlens)
    sequences = batch if starts is None else len(starts) - 1
    if grad_initial_state is not None:
        fill_state_gradient(grad_initial_state, grad_final_state, starts)
    if taps > 4:
        call = wide.Call(x, taps, starts, chunk, STARTS)
        sums = wide.backward(
            call, grad_y, grad_final_state, x, taps_first(weight), bias, initial_state, silu,
            grad_x, grad_initial_state, strides,
        )  # fmt: skip
        finish(starts, grad_x, states=(grad_initial_state,))
        return write_totals(sums, grad_weight, grad_bias)
    sums = x.new_empty((pieces, taps + 1, width), dtype=torch.float32)
    _causal_conv1d_backward_kernel[vector_grid(pieces * blocks, x.device)](
        grad_y, grad_final_state, x, taps_first(weight), bias, initial_state, starts, grad_x,
        grad_initial_state, sums, batch, sequences, length, chunk, width, *grad_y.stride()[:2],
        *strides(grad_final_state, 0, 2), *x.stride()[:2], *strides(initial_state, 0, 2),
        *grad_x.stride()[:2], *strides(grad_initial_state, 0, 2),
        W=taps, SILU=silu, BD=block, UNROLLED=UNROLLED, STARTS=STARTS,
    )  # fmt: skip
    finish(starts, grad_x, states=(grad_initial_state,))
    write_totals(sums, grad_weight, grad_bias)


def write_totals(sums, grad_weight, grad_bias):
    """Add up the pieces' shares of the filter's and the bias's gradients, in a fixed order."""
    total = sums.sum(0)
    grad_weight.copy_(total[1:].t())
    if grad_bias is not None:
        grad_bias.copy_(total[0])


def fill_state_gradient(grad_initial_state, grad_final_state, starts):
    """Write the state gradients that the kernel does not write.

    These are 0 in the first column, and the final state's gradient for empty sequences.
    """
    grad_initial_state.zero_()
    if grad_final_state is not None and starts is not None:
        empty = (starts.diff() == 0)[:, None, None]
        grad_initial_state.copy_(torch.where(empty, grad_final_state, 0))


def taps_first(weight):
    """Return the filter as contiguous `[W, D]`: an NPU loads strided channels slowly."""
    return weight.t().contiguous()


def strides(tensor, *dims: int) -> tuple[int, ...]:
    return tuple(0 if tensor is None else tensor.stride(dim) for dim in dims)


def tokens_of_a_piece(batch: int, length: int, blocks: int, device: torch.device) -> int:
    """Return the tokens of a piece: one piece for each core, but at least SHORTEST tokens."""
    share = cdiv(batch * length * blocks, hardware.num_vector_cores(device))
    return min(length, max(SHORTEST, share))
