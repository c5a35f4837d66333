"""Shared by fused_recurrent_gated_delta_rule, chunk_gated_delta_rule and chunk_kda: states.

This module allocates states, and writes them in calls without tokens. A state belongs to a sequence
and a value head: `[N, HV, K, V]`, or `[N, HV, V, K]`.
"""

from __future__ import annotations

import torch

from npu_ops.core import indices, lengths


def new(inputs, dtype: torch.dtype) -> torch.Tensor:
    """Return uninitialised states of all sequences. inputs: the operator's NamedTuple of inputs."""
    starts = inputs.cu_seqlens
    return several(inputs, inputs.q.shape[0] if starts is None else starts.shape[0] - 1, dtype)


def several(inputs, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return `count` uninitialised states."""
    keys, values = inputs.q.shape[3], inputs.v.shape[3]
    matrix = (values, keys) if inputs.state_v_first else (keys, values)
    return inputs.v.new_empty((count, inputs.v.shape[2], *matrix), dtype=dtype)


def check_starts(arguments) -> None:
    """Check the values of cu_seqlens in host memory."""
    indices.check_starts("cu_seqlens", arguments.cu_seqlens, arguments.q.shape[1])


def pass_on(arguments) -> None:
    """Write the final states of a call without tokens: the initial states."""
    given = arguments.initial_state
    lengths.pass_through(given, arguments.final_state, arguments.cu_seqlens)


def pass_gradients_back(arguments) -> None:
    """Write the gradients of the initial states of a call without tokens."""
    given = arguments.grad_final_state
    lengths.pass_through(given, arguments.grad_initial_state, arguments.cu_seqlens)
