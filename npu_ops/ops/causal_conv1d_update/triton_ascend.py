"""causal_conv1d_update in Triton, for Ascend and NVIDIA. Reference: reference.py

A piece of work is a sequence and a block of BD channels. A number in a name counts tokens back.
Plain decoding, one token of each sequence, has a kernel without a loop over tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from npu_ops.core.activations_triton_ascend import silu
from npu_ops.core.grid import cdiv, next_power_of_2, tile_elements, vector_grid
from npu_ops.core.lengths_triton_ascend import STARTS, int32_starts, looked_at, span_of
from npu_ops.ops.causal_conv1d.triton_ascend import convolve, load_row, load_taps, taps_first

# Channels in a block. The vendor's compiler reserves 192 bytes on chip for each channel (for fp32,
# W = 4, and with `window`). Wider blocks would leave cores idle if there are few sequences.
BLOCK = tile_elements(192)
# As BLOCK, for states whose channels are not contiguous: a channel takes 32 bytes in every row.
APART_BLOCK = tile_elements(768)


@triton.jit
def _load(row, column, stride, limit):
    """Load channels of a row as fp32; they need not be contiguous."""
    return tl.load(row + column * stride, mask=column < limit, other=0.0).to(tl.float32)


@triton.jit
def _store(row, value, column, stride, limit):
    tl.store(row + column * stride, value.to(row.dtype.element_ty), mask=column < limit)


@triton.jit
def _keep(state, value, at, columns, column, state_w, state_d, limit):
    """Store a row as a state's column `at`, if the state has that column."""
    limit = tl.where((at >= 0) & (at < columns), limit, 0)
    _store(state + tl.cast(at, tl.int64) * state_w, value, column, state_d, limit)


@triton.jit(do_not_specialize=["items", "tokens", "slots", "rows", "columns", "pad"])
def _causal_conv1d_update_kernel(
    x, state, taps, bias, indices, accepted, starts, window, window_indices, y,
    items, tokens, slots, rows, columns, pad, width, blocks, x_b, x_t, y_b, y_t,
    state_n, state_d, state_w, window_n, window_t, window_d, window_w,
    W: tl.constexpr, SILU: tl.constexpr, UPDATE: tl.constexpr, APART: tl.constexpr,
    BD: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    """Update states and outputs of every sequence.

    An extra sequence behind the packed ones stands for the tokens that belong to no sequence; if
    starts are invalid, for all tokens. The outputs of packed tokens are zeros before the launch.
    """
    if not APART:  # a constant, so that rows are loaded and stored contiguously
        state_d, window_d = 1, 1
    sequences = items // blocks
    if starts is not None:
        sequences = sequences - 1
        right, last = looked_at(starts, sequences, tokens, STARTS)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        n = item // blocks
        column = (item % blocks) * BD + tl.arange(0, BD)
        begin, end, b = 0, tokens, tl.cast(n, tl.int64)
        if starts is not None:
            begin, end = span_of(starts, n, sequences, tokens, right, last)
            b = tl.cast(0, tl.int64)
            nobodys = n >= sequences
            end = tl.where(nobodys & right, begin, end)  # their outputs are zeros already
            n = tl.minimum(n, sequences - 1)
        slot, first = tl.cast(n, tl.int64), 0
        if indices is not None:
            slot = tl.load(indices + n).to(tl.int64)
        if accepted is not None:
            first = tl.load(accepted + n).to(tl.int32) - 1
        good = (slot >= 0) & (slot < slots) & (slot != pad)
        # Not first + W - 1 <= columns: the sum may overflow.
        good = good & (first >= 0) & (first <= columns - (W - 1))
        nothing = tl.where(slot == pad, 0.0, float("nan"))
        if starts is not None:
            good = good & (nobodys == 0)
            nothing = tl.where(nobodys, float("nan"), nothing)
        limit = tl.where(good, width, 0)
        state_at = state + tl.where(good, slot, 0) * state_n
        # Rows move left in the slot. The oldest row is read and written first, so that no row is
        # overwritten before it is read.
        at = state_at + tl.cast(first, tl.int64) * state_w
        x3 = _load(at, column, state_d, limit)
        x2 = _load(at + (W - 3) * state_w, column, state_d, limit) if W > 2 else x3
        x1 = _load(at + (W - 2) * state_w, column, state_d, limit) if W > 2 else x3
        drop = end - begin
        if accepted is not None:
            drop = 1
        if UPDATE:
            kept = tl.where(begin < end, limit, 0)
            if W > 3:
                _keep(state_at, x3, 0 - drop, columns, column, state_w, state_d, kept)
            if W > 2:
                _keep(state_at, x2, W - 3 - drop, columns, column, state_w, state_d, kept)
            _keep(state_at, x1, W - 2 - drop, columns, column, state_w, state_d, kept)
        w0, w1, w2, w3 = load_taps(taps, column, width, width, W)
        if bias is not None:
            offset = load_row(bias, column, width)
        if window is not None:
            row = tl.cast(n, tl.int64)
            if window_indices is not None:
                row = tl.load(window_indices + n).to(tl.int64)
            exists = (row >= 0) & (row < rows)
            window_limit = tl.where(exists, limit, 0)
            window_at = window + tl.where(exists, row, 0) * window_n
        for t in range(begin, end):
            token = tl.cast(t, tl.int64)
            x0 = load_row(x + b * x_b + token * x_t, column, limit)
            z = convolve(x0, x1, x2, x3, w0, w1, w2, w3, W)
            if bias is not None:
                z += offset
            if SILU:
                z = silu(z)
            z = tl.where(good, z, nothing)
            _store(y + b * y_b + token * y_t, z, column, 1, width)
            if UPDATE:
                to = W - 1 + t - begin - drop
                _keep(state_at, x0, to, columns, column, state_w, state_d, kept)
            if window is not None:
                to = window_at + token * window_t
                if W > 3:
                    _store(to, x2, column, window_d, window_limit)
                if W > 2:
                    _store(to + (W - 3) * window_w, x1, column, window_d, window_limit)
                _store(to + (W - 2) * window_w, x0, column, window_d, window_limit)
            x3, x2, x1 = x2, x1, x0


@triton.jit(do_not_specialize=["items", "slots", "pad"])
def _one_token_kernel(
    x, state, new_state, taps, bias, indices, y, items, slots, pad, width, blocks, x_b, y_b,
    state_n, state_d, state_w,
    W: tl.constexpr, SILU: tl.constexpr, UPDATE: tl.constexpr, APART: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Update states and outputs for one token of each sequence.

    new_state is the same tensor as state. With one name for both, the compiler would make the next
    block's loads wait for these stores. A skipped sequence reads slot 0 and drops the values: a
    masked load would first fill the tile with zeros, and wait for that.
    """
    there = tl.where(slots > 0, width, 0)
    if not APART:
        state_d = 1
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        n = tl.cast(item // blocks, tl.int64)
        column = (item % blocks) * BD + tl.arange(0, BD)
        slot = n
        if indices is not None:
            slot = tl.load(indices + n).to(tl.int64)
        good = (slot >= 0) & (slot < slots) & (slot != pad)
        limit = tl.where(good, width, 0)
        at = tl.where(good, slot, 0) * state_n
        x3 = _load(state + at, column, state_d, there)
        x2 = _load(state + at + (W - 3) * state_w, column, state_d, there) if W > 2 else x3
        x1 = _load(state + at + (W - 2) * state_w, column, state_d, there) if W > 2 else x3
        x0 = load_row(x + n * x_b, column, width)
        w0, w1, w2, w3 = load_taps(taps, column, width, width, W)
        z = convolve(x0, x1, x2, x3, w0, w1, w2, w3, W)
        if bias is not None:
            z += load_row(bias, column, width)
        if SILU:
            z = silu(z)
        z = tl.where(good, z, tl.where(slot == pad, 0.0, float("nan")))
        _store(y + n * y_b, z, column, 1, width)
        if UPDATE:
            if W > 3:
                _store(new_state + at, x2, column, state_d, limit)
            if W > 2:
                _store(new_state + at + (W - 3) * state_w, x1, column, state_d, limit)
            _store(new_state + at + (W - 2) * state_w, x0, column, state_d, limit)


def causal_conv1d_update(
    x, conv_state, weight, bias, indices, accepted, starts, window, window_indices, pad, silu,
    update, y,
):  # fmt: skip
    """Write y, and the states and windows in place. Arguments as in the operator."""
    batch, tokens, width = x.shape
    count = batch if starts is None else starts.shape[0] - 1
    windows = (0, 0, 1, 0) if window is None else window.stride()
    apart = conv_state.stride(1) != 1 or windows[2] != 1
    block = _block(width, APART_BLOCK if apart else BLOCK)
    blocks = cdiv(width, block)
    items = (count + (starts is not None)) * blocks
    if not count * blocks:
        return
    if tokens == 1 and starts is accepted is window is None:
        _one_token_kernel[vector_grid(items, x.device)](
            x, conv_state, conv_state, taps_first(weight), bias, indices, y, items,
            conv_state.shape[0], pad, width, blocks, x.stride(0), y.stride(0),
            *conv_state.stride(), W=weight.shape[1], SILU=silu, UPDATE=update, APART=apart,
            BD=block,
        )  # fmt: skip
        return
    _causal_conv1d_update_kernel[vector_grid(items, x.device)](
        x, conv_state, taps_first(weight), bias, indices, accepted, int32_starts(starts), window,
        window_indices, y, items, tokens, conv_state.shape[0],
        0 if window is None else window.shape[0], conv_state.shape[2], pad, width, blocks,
        *x.stride()[:2], *y.stride()[:2],
        *conv_state.stride(), *windows, W=weight.shape[1], SILU=silu, UPDATE=update, APART=apart,
        BD=block, STARTS=STARTS,
    )  # fmt: skip


def _block(width: int, most: int) -> int:
    """Return the number of channels in a block, at most `most`.

    A block that ends behind the last channel first fills its tile with zeros, and its loads wait
    for that. So a half or a quarter of the block is used if it divides the channels.
    """
    whole = min(most, next_power_of_2(width))
    return next((b for b in (whole, whole // 2, whole // 4) if b and width % b == 0), whole)
