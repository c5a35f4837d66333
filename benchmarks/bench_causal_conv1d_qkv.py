"""Compare causal_conv1d_qkv with transformers' Qwen3-Next, and with npu-ops' separate ops."""

import torch
import torch.nn.functional as F
from npu_ops_tools.bench import Sweep

import npu_ops


def split(y, num_k_heads, num_v_heads, head_k_dim, head_v_dim):
    keys = num_k_heads * head_k_dim
    q, k, v = y.split([keys, keys, num_v_heads * head_v_dim], dim=-1)
    return (
        q.unflatten(-1, (-1, head_k_dim)),
        k.unflatten(-1, (-1, head_k_dim)),
        v.unflatten(-1, (-1, head_v_dim)).contiguous(),  # as the delta rule reads it
    )


def transformers(x, weight, activation, use_qk_l2norm, **heads):
    channels, width = weight.shape
    z = F.conv1d(x.mT, weight[:, None], padding=width - 1, groups=channels)
    q, k, v = split(F.silu(z[..., : x.shape[1]]).mT, **heads)
    return norm(q), norm(k), v


def norm(x):
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)


def parts(x, weight, activation, use_qk_l2norm, **heads):
    q, k, v = split(npu_ops.causal_conv1d(x, weight, activation=activation)[0], **heads)
    return npu_ops.l2norm(q), npu_ops.l2norm(k), v


SWEEPS = [
    Sweep(
        "causal_conv1d_qkv",
        peers={"transformers": lambda: transformers, "npu-ops in parts": lambda: parts},
        compiled="transformers",
    )
]
