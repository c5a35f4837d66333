"""Computes linear's gradients on every device with PyTorch's products, whose bits may vary."""

from __future__ import annotations

import torch

__all__ = ["linear_backward"]


def linear_backward(grad, x, weight, bias, grad_x, grad_weight, grad_bias):
    """Write the gradients; grad_bias may be None. x is `[M, K]`, weight `[N, K]`, grad `[M, N]`."""
    torch.mm(grad, weight, out=grad_x)
    torch.mm(grad.t(), x, out=grad_weight)
    if grad_bias is not None:
        torch.sum(grad, 0, out=grad_bias)
