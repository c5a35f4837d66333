"""Computes the log decay of each key channel from raw gates, for Kimi Delta Attention."""

from __future__ import annotations

import torch

from npu_ops.ops.fused_recurrent_gated_delta_rule.reference import compute_dtype
from npu_ops.ops.gdn_gate import gdn_gate


def log_decay(g, A_log, dt_bias, lower_bound: float | None):
    """Compute the log decay in fp32, or fp64 if an argument is fp64.

    Args:
        g: raw gates, `[..., HV, K]`.
        A_log: `[HV]`, or None with lower_bound.
        dt_bias: `[HV * K]` or None.
        lower_bound: None for `-exp(A_log) softplus(g + dt_bias)`, else a number below 0 for
            `lower_bound sigmoid(exp(A_log) (g + dt_bias))`.

    Returns:
        The log decay, `[..., HV, K]`, fp32 or fp64. Differentiable in all tensors.
    """
    heads, keys = g.shape[-2:]
    if lower_bound is None:
        # Each channel is computed as a head of Gated Delta Net's gate.
        each = A_log.repeat_interleave(keys)
        return gdn_gate(g.flatten(-2), each, dt_bias).unflatten(-1, (heads, keys))
    x = g.to(compute_dtype(g, A_log, dt_bias))
    if dt_bias is not None:
        x = x + dt_bias.view(heads, keys)
    if A_log is not None:
        x = x * A_log.to(x.dtype).exp()[:, None]
    return lower_bound * torch.sigmoid(x)
