"""The definition of the fused front end: causal_conv1d, split, l2norm, in plain PyTorch."""

from __future__ import annotations

import torch

from npu_ops.ops.causal_conv1d import reference as conv
from npu_ops.ops.l2norm import reference as norm


def causal_conv1d_qkv(x, weight, bias, initial_state, cu_seqlens, silu, eps, q, k, v):
    """q, k and v in fp32, of the shapes of `q`, `k` and `v`; without an eps, none is normalised."""
    y = conv.causal_conv1d(x, weight, bias, None, initial_state, cu_seqlens, silu)
    return tuple(
        part * norm.reciprocal_norm(part, eps) if normalised and eps is not None else part
        for part, normalised in zip(split(y, q, k, v), (True, True, False), strict=True)
    )


def causal_conv1d_qkv_backward(
    grad_q, grad_k, grad_v, grad_final, x, weight, bias, initial_state, cu_seqlens, silu, eps
):  # fmt: skip
    """Gradients of x, weight, bias and initial_state, in fp32. grad_final may be None."""
    wide = conv.compute_dtype(x, weight)
    grads = [grad.to(wide) for grad in (grad_q, grad_k, grad_v)]
    if eps is not None:
        y = conv.causal_conv1d(x, weight, bias, None, initial_state, cu_seqlens, silu)
        for n, part in enumerate(split(y, *grads)[:2]):
            grads[n] = norm.l2norm_backward(grads[n], part, eps)
    grad = torch.cat([grad.flatten(2) for grad in grads], dim=-1)
    return conv.causal_conv1d_backward(
        grad, grad_final, x, weight, bias, initial_state, cu_seqlens, silu
    )


def split(y, *like):
    """`[B, T, D]` as parts of the shapes of `like`, [B, T, heads, dim], side by side."""
    parts = y.split([part.shape[2] * part.shape[3] for part in like], dim=-1)
    return [part.unflatten(-1, other.shape[2:]) for part, other in zip(parts, like, strict=True)]
