"""The gated delta rule by chunks, in plain PyTorch: what it computes is the recurrence.

A chunk is a way to compute and changes no result, so the definition of right is that of
`fused_recurrent_gated_delta_rule`, with one decay for a whole state.

normalize: q and k are divided by their norms first (`l2norm`), in fp32 too.
"""

from __future__ import annotations

from npu_ops.ops.fused_recurrent_gated_delta_rule import reference as recurrent
from npu_ops.ops.l2norm import reference as norm

compute_dtype = recurrent.compute_dtype
EPS = 1e-6  # of the norm


def chunk_gated_delta_rule(
    q, k, v, g, beta, initial_state, cu_seqlens, scale, state_v_first, normalize
):
    """o `[B, T, HV, V]` and the final states `[N, HV, K, V]` (or `[N, HV, V, K]`), fp32 or fp64."""
    if normalize:
        q, k = (norm.l2norm(x, EPS) for x in (q, k))
    inputs = q, k, v, g, None, None, beta[..., None], initial_state, cu_seqlens
    return recurrent.fused_recurrent_gated_delta_rule(*inputs, scale, state_v_first)


def chunk_gated_delta_rule_backward(
    do, dht, q, k, v, g, beta, initial_state, cu_seqlens, scale, state_v_first, normalize
):
    """The gradients of q, k, v, g, beta and initial_state, fp32 or fp64; the last also if None."""
    given = q, k
    if normalize:
        q, k = (norm.l2norm(x, EPS) for x in given)
    inputs = q, k, v, g, None, None, beta[..., None], initial_state, cu_seqlens
    dq, dk, dv, dg, _, _, dbeta, dh0 = recurrent.fused_recurrent_gated_delta_rule_backward(
        do, dht, *inputs, scale, state_v_first
    )
    if normalize:
        dq, dk = (norm.l2norm_backward(d, x, EPS) for d, x in zip((dq, dk), given, strict=True))
    return dq, dk, dv, dg, dbeta[..., 0], dh0
