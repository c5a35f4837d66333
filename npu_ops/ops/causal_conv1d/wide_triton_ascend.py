"""causal_conv1d in Triton for filters of more than 4 taps. Reference: reference.py

A tile is BT tokens by BD channels. It is read once per tap, because so many taps need more rows
than a kernel can keep in named variables. The backward first writes the gradient of the convolution
in fp32, and computes the other gradients from it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from npu_ops.core.activations_triton_ascend import sigmoid, silu
from npu_ops.core.grid import cdiv, next_power_of_2, tile_elements, vector_grid
from npu_ops.ops.causal_conv1d.starts_triton_ascend import bounds_of, piece_of

# Elements in a tile, from the bytes that the vendor's compiler reserves on chip per element.
TILE = tile_elements(48)
WIDEST = 256  # channels of a tile


@triton.jit
def _tile(pointer, row, column, stride, exists):
    """Load rows and channels of a matrix in fp32, zero where they do not exist."""
    at = row[:, None].to(tl.int64) * stride + column[None, :]
    return tl.load(pointer + at, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def _before(x, state, t, n, start, end, back, column, inside, x_t, state_n, state_w,
            W: tl.constexpr):  # fmt: skip
    """Load the rows `back` rows before rows t of sequence n, from its tokens or its state."""
    row = t + -back
    mask = ((t < end) & (row >= start))[:, None] & inside[None, :]
    rows = _tile(x, row, column, x_t, mask)
    if state is not None:
        mask = (row < tl.minimum(start, end - back))[:, None] & inside[None, :]
        own = state + tl.cast(n, tl.int64) * state_n
        rows += _tile(own, W + row - start, column, state_w, mask)
    return rows


@triton.jit
def _convolution(x, taps, bias, state, t, n, start, end, column, width, x_t, state_n, state_w,
                 W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """Return rows t of sequence n before the activation."""
    inside = column < width
    z = tl.zeros((BT, BD), tl.float32)
    if bias is not None:
        z += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    for back in tl.static_range(W):
        tap = tl.load(taps + (W - 1 - back) * width + column, mask=inside, other=0.0)
        rows = _before(x, state, t, n, start, end, back, column, inside, x_t, state_n, state_w, W)
        z += rows * tap.to(tl.float32)[None, :]
    return z


@triton.jit(do_not_specialize=["batch", "sequences", "length", "chunk"])
def _forward_kernel(
    x, taps, bias, residual, state, cu_seqlens, y, batch, sequences, length, chunk, width,
    x_b, x_t, residual_b, residual_t, state_n, state_w, y_b, y_t,
    W: tl.constexpr, SILU: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(width, BD)
    items = batch * tl.cdiv(length, chunk) * blocks
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        b, first, last, n_first, n_last = piece_of(
            item, cu_seqlens, sequences, length, chunk, blocks, cu_seqlens is not None, STARTS
        )
        column = (item % blocks) * BD + tl.arange(0, BD)
        for n in range(n_first, n_last + 1):
            start, stop = bounds_of(cu_seqlens, n, length, cu_seqlens is not None)
            end = tl.minimum(last, stop)
            for begin in range(tl.maximum(first, start), end, BT):
                t = begin + tl.arange(0, BT)
                z = _convolution(x + b * x_b, taps, bias, state, t, n, start, end, column, width,
                                 x_t, state_n, state_w, W, BT, BD)  # fmt: skip
                if SILU:
                    z = silu(z)
                exists = (t < end)[:, None] & (column < width)[None, :]
                if residual is not None:
                    z += _tile(residual + b * residual_b, t, column, residual_t, exists)
                at = t[:, None].to(tl.int64) * y_t + column[None, :]
                tl.store(y + b * y_b + at, z.to(y.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["batch", "sequences", "length", "chunk"])
def _convolution_gradient_kernel(
    grad, x, taps, bias, state, cu_seqlens, g, batch, sequences, length, chunk, width,
    grad_b, grad_t, x_b, x_t, state_n, state_w,
    W: tl.constexpr, SILU: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    """Write g `[B, T, width]`, fp32: the gradient of the convolution's pre-activation output."""
    blocks = tl.cdiv(width, BD)
    items = batch * tl.cdiv(length, chunk) * blocks
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        b, first, last, n_first, n_last = piece_of(
            item, cu_seqlens, sequences, length, chunk, blocks, cu_seqlens is not None, STARTS
        )
        column = (item % blocks) * BD + tl.arange(0, BD)
        for n in range(n_first, n_last + 1):
            start, stop = bounds_of(cu_seqlens, n, length, cu_seqlens is not None)
            end = tl.minimum(last, stop)
            for begin in range(tl.maximum(first, start), end, BT):
                t = begin + tl.arange(0, BT)
                exists = (t < end)[:, None] & (column < width)[None, :]
                value = _tile(grad + b * grad_b, t, column, grad_t, exists)
                if SILU:
                    z = _convolution(x + b * x_b, taps, bias, state, t, n, start, end, column,
                                     width, x_t, state_n, state_w, W, BT, BD)  # fmt: skip
                    gate = sigmoid(z)
                    value *= gate * (1.0 + z * (1.0 - gate))
                at = t[:, None].to(tl.int64) * width + column[None, :]
                tl.store(g + b * length * width + at, value, mask=exists)


@triton.jit
def _by_rows(g, taps, grad_final, t, n, start, stop, column, width, final_n, final_w,
             W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """Return the gradient of rows t of sequence n. Rows before its start are those of its state."""
    inside = column < width
    value = tl.zeros((BT, BD), tl.float32)
    for back in tl.static_range(W):
        tap = tl.load(taps + (W - 1 - back) * width + column, mask=inside, other=0.0)
        row = t + back
        mask = ((row >= start) & (row < stop))[:, None] & inside[None, :]
        value += _tile(g, row, column, width, mask) * tap.to(tl.float32)[None, :]
    if grad_final is not None:
        mask = ((t >= stop - W) & (t < stop))[:, None] & inside[None, :]
        own = grad_final + tl.cast(n, tl.int64) * final_n
        value += _tile(own, t - (stop - W), column, final_w, mask)
    return value


@triton.jit(do_not_specialize=["batch", "sequences", "length", "chunk"])
def _row_gradient_kernel(
    g, taps, grad_final, cu_seqlens, grad_x, batch, sequences, length, chunk, width,
    final_n, final_w, grad_x_b, grad_x_t,
    W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(width, BD)
    items = batch * tl.cdiv(length, chunk) * blocks
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        b, first, last, n_first, n_last = piece_of(
            item, cu_seqlens, sequences, length, chunk, blocks, cu_seqlens is not None, STARTS
        )
        column = (item % blocks) * BD + tl.arange(0, BD)
        for n in range(n_first, n_last + 1):
            start, stop = bounds_of(cu_seqlens, n, length, cu_seqlens is not None)
            end = tl.minimum(last, stop)
            for begin in range(tl.maximum(first, start), end, BT):
                t = begin + tl.arange(0, BT)
                value = _by_rows(g + b * length * width, taps, grad_final, t, n, start, stop,
                                 column, width, final_n, final_w, W, BT, BD)  # fmt: skip
                exists = (t < end)[:, None] & (column < width)[None, :]
                at = t[:, None].to(tl.int64) * grad_x_t + column[None, :]
                tl.store(grad_x + b * grad_x_b + at, value.to(grad_x.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["items", "length"])
def _state_gradient_kernel(
    g, taps, grad_final, cu_seqlens, grad_state, items, length, width, blocks,
    final_n, final_w, grad_state_n, grad_state_w,
    W: tl.constexpr, BW: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write the columns of the states' gradients, except the first, which no filter reads."""
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        n = item // blocks
        column = (item % blocks) * BD + tl.arange(0, BD)
        start, stop = bounds_of(cu_seqlens, n, length, cu_seqlens is not None)
        own = g
        if cu_seqlens is None:
            own = g + tl.cast(n, tl.int64) * length * width
        k = 1 + tl.arange(0, BW)
        value = _by_rows(own, taps, grad_final, start - W + k, n, start, stop, column, width,
                         final_n, final_w, W, BW, BD)  # fmt: skip
        mask = (k < W)[:, None] & (column < width)[None, :]
        at = k[:, None].to(tl.int64) * grad_state_w + column[None, :]
        to = grad_state + tl.cast(n, tl.int64) * grad_state_n + at
        tl.store(to, value.to(grad_state.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["batch", "sequences", "length", "chunk"])
def _sums_kernel(
    g, x, state, cu_seqlens, sums, batch, sequences, length, chunk, width,
    x_b, x_t, state_n, state_w,
    W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    """Write sums `[pieces, W + 1, width]`: each piece's share of the gradients of bias and taps.

    The bias comes first, then the taps, the oldest first.
    """
    blocks = tl.cdiv(width, BD)
    items = batch * tl.cdiv(length, chunk) * blocks
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        b, first, last, n_first, n_last = piece_of(
            item, cu_seqlens, sequences, length, chunk, blocks, cu_seqlens is not None, STARTS
        )
        column = (item % blocks) * BD + tl.arange(0, BD)
        inside = column < width
        to = sums + tl.cast(item // blocks, tl.int64) * (W + 1) * width + column
        for back in tl.static_range(W + 1):
            total = tl.zeros((BD,), tl.float32)
            for n in range(n_first, n_last + 1):
                start, stop = bounds_of(cu_seqlens, n, length, cu_seqlens is not None)
                end = tl.minimum(last, stop)
                for begin in range(tl.maximum(first, start), end, BT):
                    t = begin + tl.arange(0, BT)
                    exists = (t < end)[:, None] & inside[None, :]
                    value = _tile(g + b * length * width, t, column, width, exists)
                    if back < W:
                        value *= _before(x + b * x_b, state, t, n, start, end, back, column,
                                         inside, x_t, state_n, state_w, W)  # fmt: skip
                    total += tl.sum(value, axis=0)
            tl.store(to + ((W - back) * width if back < W else 0), total, mask=inside)


class Call:
    """Sizes, constants and launch grid that the kernels of one call share."""

    def __init__(self, x, taps: int, starts, chunk: int, most_starts: int):
        self.device, self.starts, self.taps = x.device, starts, taps
        batch, self.length, self.width = x.shape
        self.block = min(WIDEST, next_power_of_2(self.width))
        self.blocks = cdiv(self.width, self.block)
        self.pieces = batch * cdiv(self.length, chunk)
        self.sequences = batch if starts is None else len(starts) - 1
        self.sizes = batch, self.sequences, self.length, chunk, self.width
        rows = min(TILE // self.block, next_power_of_2(chunk))
        self.constants = {"W": taps, "BT": rows, "BD": self.block, "STARTS": most_starts}

    def run(self, kernel, *arguments, **constants):
        """Launch `kernel` on the pieces: tensors first, then sizes, then strides."""
        tensors, strides = arguments
        grid = vector_grid(self.pieces * self.blocks, self.device)
        kernel[grid](*tensors, *self.sizes, *strides, **self.constants, **constants)


def forward(call: Call, x, taps, bias, residual, initial_state, silu, y, strides):
    """Write y. `strides` returns the strides of a tensor that may be None."""
    call.run(
        _forward_kernel,
        (x, taps, bias, residual, initial_state, call.starts, y),
        (*x.stride()[:2], *strides(residual, 0, 1), *strides(initial_state, 0, 2),
         *y.stride()[:2]),
        SILU=silu,
    )  # fmt: skip


def backward(
    call: Call, grad_y, grad_final_state, x, taps, bias, initial_state, silu, grad_x,
    grad_initial_state, strides,
):  # fmt: skip
    """Write the gradients of x and of the initial state, except the state's first column.

    Return the sums for the gradients of bias and taps, `[pieces, W + 1, D]`, see `_sums_kernel`.
    """
    g = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    of_x, of_state = x.stride()[:2], strides(initial_state, 0, 2)
    of_final = strides(grad_final_state, 0, 2)
    tensors = grad_y, x, taps, bias, initial_state, call.starts, g
    call.run(
        _convolution_gradient_kernel, tensors, (*grad_y.stride()[:2], *of_x, *of_state), SILU=silu
    )
    tensors = g, taps, grad_final_state, call.starts, grad_x
    call.run(_row_gradient_kernel, tensors, (*of_final, *grad_x.stride()[:2]))
    if grad_initial_state is not None:
        items = call.sequences * call.blocks
        _state_gradient_kernel[vector_grid(items, x.device)](
            g, taps, grad_final_state, call.starts, grad_initial_state, items, call.length,
            call.width, call.blocks, *of_final, *strides(grad_initial_state, 0, 2),
            W=call.taps, BW=8, BD=call.block,
        )  # fmt: skip
    sums = g.new_empty((call.pieces, call.taps + 1, call.width))
    call.run(_sums_kernel, (g, x, initial_state, call.starts, sums), (*of_x, *of_state))
    return sums
