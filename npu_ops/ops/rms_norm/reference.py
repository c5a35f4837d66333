"""Reference of rms_norm and add_rms_norm, in plain PyTorch: fp32, or fp64 with an fp64 input.

The reciprocal RMS comes from the reference of `rms_norm_gated`.
"""

from __future__ import annotations

from npu_ops.ops.rms_norm_gated.reference import compute_dtype, reciprocal_rms


def rms_norm(x, weight, eps, zero_centered):
    """Divide x by its root mean square, multiply by weight or 1 + weight; fp32 or fp64."""
    wide, w = _widened(x, weight, zero_centered)
    return wide * reciprocal_rms(wide, eps) * w


def rms_norm_backward(grad, x, weight, eps, zero_centered):
    """Return the gradients of x and weight, in fp32 or fp64."""
    wide, w = _widened(x, weight, zero_centered)
    r = reciprocal_rms(wide, eps)
    n, grad_n = wide * r, grad * w
    grad_x = r * (grad_n - n * (grad_n * n).mean(-1, keepdim=True))
    return grad_x, (grad * n).sum_to_size(weight.shape)


def add_rms_norm(x, residual, weight, eps, zero_centered):
    """Return the norm of the rounded sum, and the sum."""
    total = x + residual
    return rms_norm(total, weight, eps, zero_centered), total


def add_rms_norm_backward(grad_out, grad_total, total, weight, eps, zero_centered):
    """Return the gradients of the sum (the same for both summands) and of weight; fp32 or fp64."""
    grad_x, grad_weight = rms_norm_backward(grad_out, total, weight, eps, zero_centered)
    return grad_x if grad_total is None else grad_x + grad_total, grad_weight


def _widened(x, weight, zero_centered):
    dtype = compute_dtype(x, weight)
    w = weight.to(dtype)
    return x.to(dtype), 1 + w if zero_centered else w
