"""Shared by gdn_gate and gated_delta_rule_update: the reference of the gates, in plain PyTorch."""

from __future__ import annotations

import torch

from npu_ops.ops.gdn_gate.softplus import rate_of


def gdn_gate(a, A_log, dt_bias, b, scale, softplus_beta, softplus_threshold):
    """Compute g = -exp(A_log) * softplus(a + dt_bias), and beta = scale * sigmoid(b) or None.

    a, b: [..., HV]; A_log, dt_bias: [HV]. g and beta are computed in fp32 (fp64 if an input is). g
    keeps that dtype, beta is rounded to b's. softplus is torch's: log(1 + exp(softplus_beta x)) /
    softplus_beta, or x if softplus_beta x exceeds the threshold.
    """
    wide = g_dtype(a, A_log, dt_bias)
    x = _argument(a, dt_bias, wide)
    root, _, plus = rate_of(A_log.to(wide), x, softplus_beta, softplus_threshold)
    g = -(root * plus * root)
    if b is None:
        return g, None
    return g, (scale * b.to(_compute_dtype(b)).sigmoid()).to(b.dtype)


def gdn_gate_backward(
    grad_g, grad_beta, a, A_log, dt_bias, b, scale, softplus_beta, softplus_threshold
):
    """Return the gradients of a, A_log, dt_bias and b (None without b).

    The gradients of A_log and dt_bias are fp32 or fp64. The gradient of dt_bias is the sum of a's
    gradient before that is rounded to a's dtype.
    """
    wide = g_dtype(a, A_log, dt_bias)
    x = _argument(a, dt_bias, wide)
    root, slope, plus = rate_of(A_log.to(wide), x, softplus_beta, softplus_threshold)
    # In this order, no product overflows or underflows unless the result does.
    grad_a = -(root * slope * grad_g * root)
    grad_A_log = -(root * plus * grad_g * root).flatten(0, -2).sum(0)
    grad_dt_bias = grad_a.flatten(0, -2).sum(0)
    if b is None:
        return grad_a.to(a.dtype), grad_A_log, grad_dt_bias, None
    wide_b = b.to(_compute_dtype(b))
    grad_b = (grad_beta * scale * wide_b.sigmoid() * (-wide_b).sigmoid()).to(b.dtype)
    return grad_a.to(a.dtype), grad_A_log, grad_dt_bias, grad_b


def g_dtype(a, A_log, dt_bias):
    """Return fp64 if an input of g is fp64, else fp32."""
    return _compute_dtype(a, A_log, *(() if dt_bias is None else (dt_bias,)))


def _argument(a, dt_bias, wide):
    return a.to(wide) if dt_bias is None else a.to(wide) + dt_bias


def _compute_dtype(*tensors):
    double = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if double else torch.float32
