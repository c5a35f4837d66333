"""Shared by l2norm, causal_conv1d_qkv, chunk_gated_delta_rule and gated_delta_rule_update.

Reference of l2norm, in plain PyTorch.
"""

from __future__ import annotations

import torch


def l2norm(x, eps):
    """Compute x / sqrt(sum(x^2) + eps) over the last dimension, in fp32 (fp64 for fp64 x)."""
    wide = x.to(_compute_dtype(x))
    return wide * reciprocal_norm(wide, eps)


def l2norm_backward(grad, x, eps):
    """Return the gradient of x: (`grad` minus its projection on y) over x's norm."""
    wide = x.to(_compute_dtype(grad, x))
    rstd = reciprocal_norm(wide, eps)
    y = wide * rstd
    return rstd * (grad - y * (grad * y).sum(-1, keepdim=True))


def reciprocal_norm(x, eps):
    """Return 1 / sqrt(sum(x^2) + eps), [..., 1]. eps is under the root, unlike in F.normalize."""
    return torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def _compute_dtype(*tensors):
    double = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if double else torch.float32
