"""Shared by chunk_gated_delta_rule and chunk_kda: their reference, the recurrence.

For every chunk_size, both ops call the reference of `fused_recurrent_gated_delta_rule`. In
`chunk_gated_delta_rule` one decay per token and head applies to the whole state.
"""

from __future__ import annotations

import torch

from npu_ops.core import lengths
from npu_ops.ops.fused_recurrent_gated_delta_rule import reference as recurrent
from npu_ops.ops.l2norm import reference as norm

compute_dtype = recurrent.compute_dtype
EPS = 1e-6  # eps of the norm
_NO_DECAY = {"g": None, "gk": None, "gv": None}


def chunk_gated_delta_rule(
    q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size, state_v_first, normalize
):
    """Return o `[B, T, HV, V]` and the final states `[N, HV, K, V]` (or `[N, HV, V, K]`), fp32 or
    fp64.

    normalize: first divide q and k by their norms (`l2norm`), in the same dtype.
    """
    tokens = q, k, v, {"g": g}, beta
    return forward(*tokens, initial_state, cu_seqlens, scale, state_v_first, normalize)


def forward(q, k, v, decay, beta, initial_state, cu_seqlens, scale, state_v_first, normalize):
    """Return o and the final states. decay: {"g" or "gk": tensor}, the gate of the recurrence."""
    if normalize:
        q, k = (norm.l2norm(x, EPS) for x in (q, k))
    inputs = {"initial_state": initial_state, "cu_seqlens": cu_seqlens, "scale": scale}
    return recurrent.fused_recurrent_gated_delta_rule(
        q, k, v, **_NO_DECAY | decay, beta=beta[..., None], state_v_first=state_v_first, **inputs
    )


def chunk_gated_delta_rule_prefill(
    q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size, state_v_first, normalize
):
    """Return o, the final states, and the state before each chunk, ordered by sequence."""
    settings = scale, chunk_size, state_v_first, normalize
    batch, tokens, matrix = *q.shape[:2], (q.shape[3], v.shape[3])
    matrix = matrix[::-1] if state_v_first else matrix
    spans = [(b, 0, tokens) for b in range(batch)]
    if cu_seqlens is not None:
        starts = cu_seqlens.tolist()
        spans = [(0, *ends) for ends in zip(starts, starts[1:], strict=False)]
    o = torch.zeros_like(v, dtype=g.dtype)
    final = g.new_zeros((len(spans), v.shape[2], *matrix))
    packed_count = tokens // chunk_size + len(spans)
    count = batch * -(-tokens // chunk_size) if cu_seqlens is None else packed_count
    before, row = g.new_zeros((count, *final.shape[1:])), 0
    for n, (b, begin, end) in enumerate(spans):
        state = final[n : n + 1] if initial_state is None else initial_state[n : n + 1].to(g.dtype)
        for first in range(begin, end, chunk_size):
            before[row], row = state[0], row + 1
            chunk = slice(first, min(first + chunk_size, end))
            inputs = (x[b : b + 1, chunk] for x in (q, k, v, g, beta))
            o[b : b + 1, chunk], state = chunk_gated_delta_rule(*inputs, state, None, *settings)
        final[n] = state[0]
    return o, final, before


def chunk_gated_delta_rule_backward(
    grad_o, grad_final_state, q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size,
    state_v_first, normalize,
):  # fmt: skip
    """Return the gradients of q, k, v, g, beta and initial_state, fp32 or fp64.

    The gradient of initial_state is returned even if initial_state is None.
    """
    tokens = q, k, v, {"g": g}, beta
    return backward(
        grad_o, grad_final_state, *tokens, initial_state, cu_seqlens, scale, state_v_first,
        normalize,
    )  # fmt: skip


def backward(
    grad_o, grad_final_state, q, k, v, decay, beta, initial_state, cu_seqlens, scale,
    state_v_first, normalize,
):  # fmt: skip
    """Return the gradients of q, k, v, the one gate in `decay`, beta and initial_state."""
    given, gates = (q, k), _NO_DECAY | decay
    if normalize:
        q, k = (norm.l2norm(x, EPS) for x in given)
    grad_q, grad_k, grad_v, *of_gates, grad_beta, grad_initial_state = (
        recurrent.fused_recurrent_gated_delta_rule_backward(
            grad_o, grad_final_state, q, k, v, *gates.values(), beta[..., None], initial_state,
            cu_seqlens, scale, state_v_first,
        )
    )  # fmt: skip
    (grad_g,) = (x for x, name in zip(of_gates, gates, strict=True) if name in decay)
    if normalize:
        grad_q, grad_k = (
            norm.l2norm_backward(grad, x, EPS)
            for grad, x in zip((grad_q, grad_k), given, strict=True)
        )
        grad_q, grad_k = lengths.without_nobodys(cu_seqlens, grad_q, grad_k)
    return grad_q, grad_k, grad_v, grad_g, grad_beta[..., 0], grad_initial_state
