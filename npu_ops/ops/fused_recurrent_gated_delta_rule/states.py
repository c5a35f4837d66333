"""Shared by fused_recurrent_gated_delta_rule and chunk_gated_delta_rule: states of sequences.

A state belongs to a sequence and a value head: `[N, HV, K, V]`, or `[N, HV, V, K]`.
"""

from __future__ import annotations

import torch

from npu_ops.core import indices, lengths


def new(inputs, dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised states, from the operator's inputs by name."""
    q, v, starts = inputs.q, inputs.v, inputs.cu_seqlens
    sequences = q.shape[0] if starts is None else starts.shape[0] - 1
    keys, values = q.shape[3], v.shape[3]
    matrix = (values, keys) if inputs.state_v_first else (keys, values)
    return v.new_empty((sequences, v.shape[2], *matrix), dtype=dtype)


def before_chunks(inputs, dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised states before chunks; of packed sequences as many as there may be."""
    batch, tokens, chunk = *inputs.q.shape[:2], inputs.chunk_size
    count = batch * -(-tokens // chunk)
    if inputs.cu_seqlens is not None:
        count = tokens // chunk + inputs.cu_seqlens.shape[0] - 1
    keys, values = inputs.q.shape[3], inputs.v.shape[3]
    matrix = (values, keys) if inputs.state_v_first else (keys, values)
    return inputs.v.new_empty((count, inputs.v.shape[2], *matrix), dtype=dtype)


def check_starts(arguments) -> None:
    """Check where sequences begin and end, in host memory."""
    indices.check_starts("cu_seqlens", arguments.cu_seqlens, arguments.q.shape[1])


def pass_on(arguments) -> None:
    """Write the final states of sequences without tokens: their initial ones."""
    given = arguments.initial_state
    lengths.pass_through(given, arguments.final_state, arguments.cu_seqlens)


def pass_gradients_back(arguments) -> None:
    """Write the gradients of the initial states of sequences without tokens."""
    given = arguments.grad_final_state
    lengths.pass_through(given, arguments.grad_initial_state, arguments.cu_seqlens)
