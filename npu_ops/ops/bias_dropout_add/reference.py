"""Reference of bias-dropout-add, in plain PyTorch."""

from __future__ import annotations

import torch

from npu_ops.core import rng


def bias_dropout_add(x, bias, residual, rng_state, p):
    """Compute residual + dropout(x + bias) in fp32 (fp64 if an input is).

    x, residual: [..., h]. bias: None, [h] or x's shape. rng_state: None drops nothing.
    """
    wide = x.to(compute_dtype(x, bias, residual))  # torch promotes the sums below to this dtype
    total = wide if bias is None else wide + bias
    return residual + dropout(total, rng_state, p)


def bias_dropout_add_backward(grad, rng_state, p):
    """Return the gradient of x + bias, and its sum over rows, in fp32 (fp64 if `grad` is)."""
    grad_x = dropout(grad.to(compute_dtype(grad)), rng_state, p)
    return grad_x, grad_x.reshape(-1, grad_x.shape[-1]).sum(0)


def dropout(x, rng_state, p):
    """Zero the elements that the mask of `rng_state` drops, and divide the others by their keep
    probability."""
    if rng_state is None:
        return x
    width = x.shape[-1]
    keep = rng.keep_mask(x.numel() // width, width, p, rng_state).view(x.shape)
    return torch.where(keep, x * rng.scale(p), 0)


def compute_dtype(*tensors):
    """Return fp64 if an input is fp64, else fp32."""
    double = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if double else torch.float32
