"""Shared by linear and grouped_linear: the reference of linear. x and gradients are 2-D."""

from __future__ import annotations

import torch


def linear(x, weight, bias):
    """Compute x weight^T + bias in fp32 (fp64 for fp64 x)."""
    wide = compute_dtype(x)
    out = x.to(wide).mm(weight.to(wide).t())
    return out if bias is None else out + bias


def linear_backward(grad, x, weight, bias):
    """Return the gradients of x, weight and bias. bias may be None."""
    wide = compute_dtype(x)
    grad = grad.to(wide)
    return grad.mm(weight.to(wide)), grad.t().mm(x.to(wide)), grad.sum(0)


def compute_dtype(x) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
