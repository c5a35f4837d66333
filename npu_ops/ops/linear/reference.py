"""The definition of right."""

from __future__ import annotations

import torch

from npu_ops.core.rows import as_matrix


def linear(x, weight, bias):
    """x weight^T + bias, in fp32 (fp64 for fp64 x)."""
    wide = compute_dtype(x)
    out = as_matrix(x).to(wide).mm(weight.to(wide).t())
    out = out if bias is None else out + bias.to(wide)
    return out.view(*x.shape[:-1], weight.shape[0])


def linear_backward(grad, x, weight, bias):
    """The gradients of x, weight and bias; leading dimensions are rows."""
    wide = compute_dtype(x)
    rows, gradients = (as_matrix(t).to(wide) for t in (x, grad))
    grad_x = gradients.mm(weight.to(wide)).view(x.shape)
    return grad_x, gradients.t().mm(rows), None if bias is None else gradients.sum(0)


def compute_dtype(x) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
