"""Kimi Delta Attention in Triton, for Ascend and NVIDIA: token by token, as the recurrence goes.

Definition: reference.py
"""

from __future__ import annotations

import torch

from npu_ops.core.lengths_triton_ascend import finish, int32_starts
from npu_ops.ops.chunk_gated_delta_rule.reference import EPS
from npu_ops.ops.fused_recurrent_gated_delta_rule import triton_ascend as recurrent
from npu_ops.ops.l2norm import triton_ascend as norm


def chunk_kda(
    q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size, state_v_first, normalize,
    o, final_state,
):  # fmt: skip
    """Write o, and final_state unless it is None; the arguments are the operator's."""
    if normalize:
        q, k = _normalized(q), _normalized(k)
    recurrent.fused_recurrent_gated_delta_rule(
        q, k, v, None, g, None, beta[..., None], initial_state, cu_seqlens, scale, state_v_first,
        o, final_state,
    )  # fmt: skip


def chunk_kda_backward(
    grad_o, grad_final_state, q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size,
    state_v_first, normalize, grad_q, grad_k, grad_v, grad_g, grad_beta, grad_initial_state,
):  # fmt: skip
    """Write the gradients; grad_initial_state may be None. The arguments are the operator's."""
    given = q, k
    if normalize:
        q, k = _normalized(q), _normalized(k)
    of_rows = [torch.empty_like(x, dtype=torch.float32) for x in (q, k)]
    recurrent.fused_recurrent_gated_delta_rule_backward(
        grad_o, grad_final_state, q, k, v, None, g, None, beta[..., None], initial_state,
        cu_seqlens, scale, state_v_first, *of_rows, grad_v, None, grad_g, None,
        grad_beta[..., None], grad_initial_state,
    )  # fmt: skip
    for gradient, found, x in zip((grad_q, grad_k), of_rows, given, strict=True):
        if normalize:
            norm.l2norm_backward(found.flatten(0, 1), x.flatten(0, 1), EPS, gradient.flatten(0, 1))
        else:
            gradient.copy_(found)
    finish(int32_starts(cu_seqlens), grad_q, grad_k)  # rows of nobody: 0, whatever x is there


def _normalized(x):
    """Rows of q or k over their norms, in fp32."""
    out = torch.empty_like(x, dtype=torch.float32)
    norm.l2norm(x.flatten(0, 1), EPS, out.flatten(0, 1))
    return out
