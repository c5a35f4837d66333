"""The definition of Kimi Delta Attention: the recurrence, whatever the chunk_size is.

Token by token, for every value head: `S = diag(exp(g)) S`, `S = S + k (beta (v - S^T k))^T`,
`o = S^T (scale q)`. That is `fused_recurrent_gated_delta_rule` with one decay for each key.
"""

from __future__ import annotations

from npu_ops.ops.chunk_gated_delta_rule import reference as by_chunks


def chunk_kda(
    q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size, state_v_first, normalize
):
    """o `[B, T, HV, V]` and the final states `[N, HV, K, V]` (or `[N, HV, V, K]`), fp32 or fp64.

    g: `[B, T, HV, K]`. normalize: q and k are divided by their norms first.
    """
    tokens = q, k, v, {"gk": g}, beta
    return by_chunks.forward(*tokens, initial_state, cu_seqlens, scale, state_v_first, normalize)


def chunk_kda_backward(
    grad_o, grad_final_state, q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size,
    state_v_first, normalize,
):  # fmt: skip
    """The gradients of q, k, v, g, beta and initial_state (also where it is None), fp32 or fp64."""
    tokens = q, k, v, {"gk": g}, beta
    return by_chunks.backward(
        grad_o, grad_final_state, *tokens, initial_state, cu_seqlens, scale, state_v_first,
        normalize,
    )  # fmt: skip
