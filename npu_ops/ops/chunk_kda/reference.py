"""Reference of Kimi Delta Attention: the recurrence, for any chunk_size.

Token by token, for every value head: `S = diag(exp(g)) S`, `S = S + k (beta (v - S^T k))^T`, `o =
S^T (scale q)`. This equals `fused_recurrent_gated_delta_rule` with a decay for each key (gk).
"""

from __future__ import annotations

from npu_ops.ops.chunk_gated_delta_rule import reference as by_chunks


def chunk_kda(
    q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size, state_v_first, normalize
):
    """Return o `[B, T, HV, V]` and the final states `[N, HV, K, V]` (or `[N, HV, V, K]`), fp32 or
    fp64.

    g: `[B, T, HV, K]`. normalize: first divide q and k by their norms.
    """
    tokens = q, k, v, {"gk": g}, beta
    return by_chunks.forward(*tokens, initial_state, cu_seqlens, scale, state_v_first, normalize)


def chunk_kda_backward(
    grad_o, grad_final_state, q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size,
    state_v_first, normalize,
):  # fmt: skip
    """Return the gradients of q, k, v, g, beta and initial_state, fp32 or fp64.

    The gradient of initial_state is returned even if initial_state is None.
    """
    tokens = q, k, v, {"gk": g}, beta
    return by_chunks.backward(
        grad_o, grad_final_state, *tokens, initial_state, cu_seqlens, scale, state_v_first,
        normalize,
    )  # fmt: skip
