"""Reference of the fused op: causal_conv1d, split, l2norm, in plain PyTorch."""

from __future__ import annotations

import torch

from npu_ops.ops.causal_conv1d import reference as conv
from npu_ops.ops.l2norm import reference as norm


def causal_conv1d_qkv(x, weight, bias, initial_state, cu_seqlens, silu, eps, heads):
    """Return q, k and v in fp32 (fp64 if x or weight is), and the final state.

    eps: None skips the norm.
    """
    y = conv.causal_conv1d(x, weight, bias, None, initial_state, cu_seqlens, silu)
    q, k, v = split(y, heads)
    if eps is not None:
        q, k = (part * norm.reciprocal_norm(part, eps) for part in (q, k))
    return q, k, v, conv.final_state(x, weight.shape[1], initial_state, cu_seqlens)


def causal_conv1d_qkv_backward(
    grad_q, grad_k, grad_v, grad_final_state, x, weight, bias, initial_state, cu_seqlens, silu, eps,
    heads,
):  # fmt: skip
    """Return the gradients of x, weight, bias and initial_state. grad_final_state may be None."""
    wide = conv.compute_dtype(x, weight)
    grad_q, grad_k, grad_v = (grad.to(wide) for grad in (grad_q, grad_k, grad_v))
    if eps is not None:
        y = conv.causal_conv1d(x, weight, bias, None, initial_state, cu_seqlens, silu)
        q, k, _ = split(y, heads)
        grad_q, grad_k = norm.l2norm_backward(grad_q, q, eps), norm.l2norm_backward(grad_k, k, eps)
    grad_y = torch.cat([grad.flatten(2) for grad in (grad_q, grad_k, grad_v)], dim=-1)
    return conv.causal_conv1d_backward(
        grad_y, grad_final_state, x, weight, bias, initial_state, cu_seqlens, silu
    )


def split(y, heads):
    """Split `[B, T, D]` into q, k and v, each [B, T, heads, dim]."""
    parts = y.split([count * dim for count, dim in shapes(heads)], dim=-1)
    return [part.unflatten(-1, shape) for part, shape in zip(parts, shapes(heads), strict=True)]


def shapes(heads):
    """Return (heads, dim) of q, k and v, from [key heads, value heads, key dim, value dim]."""
    key_heads, value_heads, key_dim, value_dim = heads
    return (key_heads, key_dim), (key_heads, key_dim), (value_heads, value_dim)
