"""The gated delta rule by chunks, in plain PyTorch: what it computes is the recurrence.

A chunk is a way to compute and changes no result, so the definition of right is that of
`fused_recurrent_gated_delta_rule`, with one decay for a whole state.
"""

from __future__ import annotations

from npu_ops.ops.fused_recurrent_gated_delta_rule import reference as recurrent

compute_dtype = recurrent.compute_dtype


def chunk_gated_delta_rule(q, k, v, g, beta, initial_state, cu_seqlens, scale, state_v_first):
    """o `[B, T, HV, V]` and the final states `[N, HV, K, V]` (or `[N, HV, V, K]`), fp32 or fp64."""
    inputs = q, k, v, g, None, None, beta[..., None], initial_state, cu_seqlens
    return recurrent.fused_recurrent_gated_delta_rule(*inputs, scale, state_v_first)


def chunk_gated_delta_rule_backward(
    do, dht, q, k, v, g, beta, initial_state, cu_seqlens, scale, state_v_first
):
    """The gradients of q, k, v, g, beta and initial_state, fp32 or fp64; the last also if None."""
    inputs = q, k, v, g, None, None, beta[..., None], initial_state, cu_seqlens
    dq, dk, dv, dg, _, _, dbeta, dh0 = recurrent.fused_recurrent_gated_delta_rule_backward(
        do, dht, *inputs, scale, state_v_first
    )
    return dq, dk, dv, dg, dbeta[..., 0], dh0
