"""Shared by causal_conv1d and causal_conv1d_qkv: allocates their states and gradients.

Also writes the results of calls without tokens.
"""

from __future__ import annotations

import torch

from npu_ops.core import indices, lengths
from npu_ops.core.rows import like_one_piece


def channels_last(state):
    """Return a `[N, D, W]` state with D contiguous, as the kernels read it."""
    return state if state.stride(1) == 1 else state.transpose(1, 2).contiguous().transpose(1, 2)


def new_state(x, count: int, width: int, state=None):
    """Return an uninitialised `[count, D, W]` state, D contiguous, of x's dtype or the state's."""
    dtype = x.dtype if state is None else state.dtype
    return x.new_empty((count, width, x.shape[-1]), dtype=dtype).transpose(1, 2)


def sequences(x, cu_seqlens) -> int:
    """Return the number of sequences in x."""
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def check_starts(arguments) -> None:
    """Check the values of `arguments.cu_seqlens`, on which the reference relies."""
    indices.check_starts("cu_seqlens", arguments.cu_seqlens, arguments.x.shape[1])


def final_state(inputs):
    """Return an uninitialised final state for an operator's inputs, or None if it is not wanted."""
    if not inputs.output_final_state:
        return None
    x, width = inputs.x, inputs.weight.shape[1]
    return new_state(x, sequences(x, inputs.cu_seqlens), width, inputs.initial_state)


def no_tokens(arguments) -> None:
    """Write the outputs of a call without tokens: the final state is the initial state."""
    given = arguments.initial_state
    lengths.pass_through(given, arguments.final_state, arguments.cu_seqlens)


def no_tokens_backward(arguments) -> None:
    """Write the gradients of a call without tokens.

    The gradients of weight and bias are 0. The gradient of the initial state is the final state's.
    """
    given, starts = arguments.grad_final_state, arguments.cu_seqlens
    lengths.pass_through(None, arguments.grad_weight, None)
    lengths.pass_through(None, arguments.grad_bias, None)
    lengths.pass_through(given, arguments.grad_initial_state, starts)


def gradients(inputs):
    """Return uninitialised gradients of x, weight, bias and initial state; None for absent ones."""
    x, weight, bias, state = inputs.x, inputs.weight, inputs.bias, inputs.initial_state
    grad_bias = None if bias is None else torch.empty_like(bias)
    grad_state = None if state is None else new_state(x, state.shape[0], weight.shape[1])
    return like_one_piece(x), torch.empty_like(weight), grad_bias, grad_state
