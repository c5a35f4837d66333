"""Shared by rms_norm, rms_norm_gated and qk_norm_rope: reference of rms_norm_gated.

rms_norm and qk_norm_rope use `reciprocal_rms` and `compute_dtype`.
"""

from __future__ import annotations

import torch


def rms_norm_gated(x, weight, z, eps, norm_before_gate, activation):
    """Compute rmsnorm(x) * weight * act(z), or rmsnorm(x * act(z)) * weight.

    The norm is over the last dimension. weight broadcasts to x and z. The result is computed in
    fp32 (fp64 if an input is fp64) and rounded once to x's dtype.
    """
    wide_x, w, wide_z = _widened(x, weight, z)
    gate = activate(wide_z, activation)
    u = wide_x if norm_before_gate else wide_x * gate
    y = u * reciprocal_rms(u, eps) * w
    return (y * gate if norm_before_gate else y).to(x.dtype)


def rms_norm_gated_backward(grad, x, weight, z, eps, norm_before_gate, activation):
    """Return the gradients of x, weight and z. The gradient of weight is fp32 or fp64."""
    grad, wide_x, w, wide_z = _widened(grad, x, weight, z)
    gate, slope = activate(wide_z, activation), activation_slope(wide_z, activation)
    u = wide_x if norm_before_gate else wide_x * gate
    r = reciprocal_rms(u, eps)
    n = u * r
    grad_n = grad * w * gate if norm_before_gate else grad * w
    grad_u = r * (grad_n - n * (grad_n * n).mean(-1, keepdim=True))
    if norm_before_gate:
        grads = grad_u, grad * n * gate, grad * n * w * slope
    else:
        grads = grad_u * gate, grad * n, grad_u * wide_x * slope
    grad_x, grad_weight, grad_z = grads
    return grad_x.to(x.dtype), grad_weight.sum_to_size(weight.shape), grad_z.to(z.dtype)


def reciprocal_rms(x, eps):
    """Return 1 / sqrt(mean(x^2) + eps), [..., 1]."""
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def activate(z, activation):
    """Return silu(z) = z * sigmoid(z), or sigmoid(z)."""
    return z * z.sigmoid() if activation == "silu" else z.sigmoid()


def activation_slope(z, activation):
    """Return the derivative of `activate`."""
    slope = z.sigmoid() * (-z).sigmoid()
    return z.sigmoid() + z * slope if activation == "silu" else slope


def compute_dtype(*tensors):
    """Return fp64 if an input is fp64, else fp32."""
    double = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if double else torch.float32


def _widened(*tensors):
    return (tensor.to(compute_dtype(*tensors)) for tensor in tensors)
