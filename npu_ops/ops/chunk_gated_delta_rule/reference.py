"""The definition of the chunked gated delta rule: the recurrence, whatever the chunk_size is.

That of `fused_recurrent_gated_delta_rule`, with one decay for a whole state.
"""

from __future__ import annotations

from npu_ops.ops.fused_recurrent_gated_delta_rule import reference as recurrent
from npu_ops.ops.l2norm import reference as norm

compute_dtype = recurrent.compute_dtype
EPS = 1e-6  # of the norm


def chunk_gated_delta_rule(
    q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size, state_v_first, normalize
):
    """o `[B, T, HV, V]` and the final states `[N, HV, K, V]` (or `[N, HV, V, K]`), fp32 or fp64.

    normalize: q and k are divided by their norms first (`l2norm`), in fp32 too.
    """
    if normalize:
        q, k = (norm.l2norm(x, EPS) for x in (q, k))
    inputs = q, k, v, g, None, None, beta[..., None], initial_state, cu_seqlens
    return recurrent.fused_recurrent_gated_delta_rule(*inputs, scale, state_v_first)


def chunk_gated_delta_rule_backward(
    grad_o, grad_final_state, q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size,
    state_v_first, normalize,
):  # fmt: skip
    """The gradients of q, k, v, g, beta and initial_state, fp32 or fp64; the last also if None."""
    given = q, k
    if normalize:
        q, k = (norm.l2norm(x, EPS) for x in given)
    inputs = q, k, v, g, None, None, beta[..., None], initial_state, cu_seqlens
    grad_q, grad_k, grad_v, grad_g, _, _, grad_beta, grad_initial_state = (
        recurrent.fused_recurrent_gated_delta_rule_backward(
            grad_o, grad_final_state, *inputs, scale, state_v_first
        )
    )
    if normalize:
        grad_q, grad_k = (
            norm.l2norm_backward(grad, x, EPS)
            for grad, x in zip((grad_q, grad_k), given, strict=True)
        )
    return grad_q, grad_k, grad_v, grad_g, grad_beta[..., 0], grad_initial_state
