"""causal_conv1d_qkv in Triton, for Ascend and NVIDIA. Reference: reference.py

One launch runs causal_conv1d's loop over the channels of q, of k and of v. A block of q or k holds
whole heads, so a row is normalised before it leaves the chip.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from npu_ops.core.grid import cdiv, next_power_of_2, tile_elements, vector_grid
from npu_ops.core.lengths_triton_ascend import finish, int32_starts
from npu_ops.ops.causal_conv1d import triton_ascend as conv

# Channels in a block, from the bytes that the vendor's compiler reserves on chip for each channel
# (fp32, W = 4).
BLOCK = tile_elements(96)
BACKWARD_BLOCK = tile_elements(192)


@triton.jit(do_not_specialize=["batch", "sequences", "length", "chunk"])
def _causal_conv1d_qkv_kernel(
    x, taps, bias, state, cu_seqlens, q, k, v, keys, eps, batch, sequences, length, chunk, width,
    x_b, x_t, state_n, state_w, key_b, key_t, v_b, v_t,
    W: tl.constexpr, SILU: tl.constexpr, HEAD: tl.constexpr, BD: tl.constexpr, STEP: tl.constexpr,
    BV: tl.constexpr, UNROLLED: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    conv.convolve_channels(
        x, taps, bias, None, state, cu_seqlens, q, 0, keys, eps, batch, sequences, length, chunk,
        width, x_b, x_t, 0, 0, state_n, state_w, key_b, key_t,
        W, SILU, HEAD, BD, STEP, UNROLLED, STARTS,
    )  # fmt: skip
    conv.convolve_channels(
        x, taps, bias, None, state, cu_seqlens, k, keys, 2 * keys, eps, batch, sequences, length,
        chunk, width, x_b, x_t, 0, 0, state_n, state_w, key_b, key_t,
        W, SILU, HEAD, BD, STEP, UNROLLED, STARTS,
    )  # fmt: skip
    conv.convolve_channels(
        x, taps, bias, None, state, cu_seqlens, v, 2 * keys, width, eps, batch, sequences, length,
        chunk, width, x_b, x_t, 0, 0, state_n, state_w, v_b, v_t,
        W, SILU, 0, BV, BV, UNROLLED, STARTS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["batch", "sequences", "length", "chunk"])
def _causal_conv1d_qkv_backward_kernel(
    grad_q, grad_k, grad_v, grad_final, x, taps, bias, state, cu_seqlens, grad_x, grad_state, sums,
    keys, eps, batch, sequences, length, chunk, width,
    q_b, q_t, k_b, k_t, v_b, v_t, final_n, final_w, x_b, x_t, state_n, state_w,
    grad_x_b, grad_x_t, grad_state_n, grad_state_w,
    W: tl.constexpr, SILU: tl.constexpr, HEAD: tl.constexpr, BD: tl.constexpr, STEP: tl.constexpr,
    BV: tl.constexpr, UNROLLED: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    conv.convolve_channels_backward(
        grad_q, grad_final, x, taps, bias, state, cu_seqlens, grad_x, grad_state, sums,
        0, keys, eps, batch, sequences, length, chunk, width, q_b, q_t, final_n, final_w,
        x_b, x_t, state_n, state_w, grad_x_b, grad_x_t, grad_state_n, grad_state_w,
        W, SILU, HEAD, BD, STEP, UNROLLED, STARTS,
    )  # fmt: skip
    conv.convolve_channels_backward(
        grad_k, grad_final, x, taps, bias, state, cu_seqlens, grad_x, grad_state, sums,
        keys, 2 * keys, eps, batch, sequences, length, chunk, width, k_b, k_t, final_n, final_w,
        x_b, x_t, state_n, state_w, grad_x_b, grad_x_t, grad_state_n, grad_state_w,
        W, SILU, HEAD, BD, STEP, UNROLLED, STARTS,
    )  # fmt: skip
    conv.convolve_channels_backward(
        grad_v, grad_final, x, taps, bias, state, cu_seqlens, grad_x, grad_state, sums,
        2 * keys, width, eps, batch, sequences, length, chunk, width, v_b, v_t, final_n, final_w,
        x_b, x_t, state_n, state_w, grad_x_b, grad_x_t, grad_state_n, grad_state_w,
        W, SILU, 0, BV, BV, UNROLLED, STARTS,
    )  # fmt: skip


def causal_conv1d_qkv(
    x, weight, bias, initial_state, cu_seqlens, silu, eps, heads, q, k, v, final_state
):  # fmt: skip
    """Write q, k and v, normalised unless eps is None, and the final state unless it is None."""
    starts = int32_starts(cu_seqlens)
    plan = _Plan(x, heads, starts, eps, BLOCK)
    _causal_conv1d_qkv_kernel[plan.grid](
        x, conv.taps_first(weight), bias, initial_state, starts, q, k, v, plan.keys, eps or 0.0,
        *plan.sizes, *x.stride()[:2], *conv.strides(initial_state, 0, 2), *q.stride()[:2],
        *v.stride()[:2], W=weight.shape[1], SILU=silu, UNROLLED=conv.UNROLLED, **plan.constants,
    )  # fmt: skip
    conv.write_final_state(x, initial_state, starts, final_state)
    finish(starts, q, k, v, states=(final_state,))


def causal_conv1d_qkv_backward(
    grad_q, grad_k, grad_v, grad_final_state, x, weight, bias, initial_state, cu_seqlens, silu, eps,
    heads, grad_x, grad_weight, grad_bias, grad_initial_state,
):  # fmt: skip
    """Write the gradients; grad_bias and grad_initial_state may be None."""
    starts = int32_starts(cu_seqlens)
    plan = _Plan(x, heads, starts, eps, BACKWARD_BLOCK)
    if grad_initial_state is not None:
        conv.fill_state_gradient(grad_initial_state, grad_final_state, starts)
    width, taps = weight.shape
    sums = x.new_empty((plan.pieces, taps + 1, width), dtype=torch.float32)
    _causal_conv1d_qkv_backward_kernel[plan.grid](
        grad_q, grad_k, grad_v, grad_final_state, x, conv.taps_first(weight), bias, initial_state,
        starts, grad_x, grad_initial_state, sums, plan.keys, eps or 0.0, *plan.sizes,
        *grad_q.stride()[:2],
        *grad_k.stride()[:2], *grad_v.stride()[:2], *conv.strides(grad_final_state, 0, 2),
        *x.stride()[:2], *conv.strides(initial_state, 0, 2), *grad_x.stride()[:2],
        *conv.strides(grad_initial_state, 0, 2), W=taps, SILU=silu, UNROLLED=conv.UNROLLED,
        **plan.constants,
    )  # fmt: skip
    finish(starts, grad_x, states=(grad_initial_state,))
    conv.write_totals(sums, grad_weight, grad_bias)


class _Plan:
    """How a launch divides the work.

    With the norm, a block of q or k holds whole heads: as many as fit if their size is a power of
    two, else one.
    """

    def __init__(self, x, heads, starts, eps, most: int):
        batch, length, width = x.shape
        key_heads, value_heads, head, value_dim = heads
        self.keys = key_heads * head
        lanes = next_power_of_2(head)
        block = min(most, next_power_of_2(self.keys))
        step = block
        if eps is not None and lanes != head:
            block, step = lanes, head
        values = min(most, next_power_of_2(value_heads * value_dim))
        blocks = min(cdiv(self.keys, step), cdiv(width - 2 * self.keys, values))
        chunk = conv.tokens_of_a_piece(batch, length, blocks, x.device)
        self.pieces = batch * cdiv(length, chunk)
        self.sizes = batch, batch if starts is None else len(starts) - 1, length, chunk, width
        self.constants = {
            "HEAD": 0 if eps is None else lanes, "BD": block, "STEP": step, "BV": values,
            "STARTS": conv.STARTS,
        }  # fmt: skip
        self.grid = vector_grid(self.pieces * blocks, x.device)
