"""Compare qk_norm_rope with transformers' layers, and with PyTorch norms and npu-ops' rope."""

import dataclasses

import torch
from npu_ops_tools.bench import Sweep
from npu_ops_tools.bench.peers import SGLANG
from npu_ops_tools.bench.sweep import first_case
from transformers.models.qwen3_next.modeling_qwen3_next import apply_rotary_pos_emb

import npu_ops


def of_text(op, model, size):
    """Return the case with one axis of positions, which transformers' function needs."""
    return dataclasses.replace(first_case(op, model, size), section=None)


def in_one_dtype(inputs):
    tables = {name: inputs[name].to(inputs["qkv"].dtype) for name in ("cos", "sin")}
    return inputs | tables


def transformers(qkv, q_weight, k_weight, cos, sin, **case):
    """Compute the function as Qwen3Attention and Qwen3_5Attention do."""
    q, k, v, gate = normed(qkv, q_weight, k_weight, **case)
    return *apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=-2), v, gate


def parts(qkv, q_weight, k_weight, cos, sin, **case):
    q, k, v, gate = normed(qkv, q_weight, k_weight, **case)
    q, k = npu_ops.apply_rotary_pos_emb(
        q, k, cos, sin, layout="TND", rotary_dim=case["rotary_dim"], inplace=not q.requires_grad
    )
    return q, k, v, gate


def normed(qkv, q_weight, k_weight, num_heads, num_kv_heads, zero_centered, gated, **rest):
    dim = q_weight.shape[0]
    heads = qkv.unflatten(-1, (-1, dim))
    q, k, v = heads.split([num_heads * (2 if gated else 1), num_kv_heads, num_kv_heads], dim=-2)
    q, gate = (q[..., 0::2, :], q[..., 1::2, :]) if gated else (q, None)
    return norm(q, q_weight, zero_centered), norm(k, k_weight, zero_centered), v, gate


def norm(x, weight, zero_centered):
    """Compute the norm as Qwen3RMSNorm or, if zero-centered, Qwen3NextRMSNorm does."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    if zero_centered:
        return (wide * (1 + weight.float())).to(x.dtype)
    return weight * wide.to(x.dtype)


SWEEPS = [
    Sweep(
        "qk_norm_rope",
        peers={
            "transformers": lambda: transformers,
            "npu-ops in parts": lambda: parts,
            "SGLang": SGLANG,
        },
        compiled="transformers",
        models=("qwen3-vl-8b", "qwen3.5-9b", "qwen3-next-80b-a3b", "qwen3.5-35b-a3b"),
        case=of_text,
        prepare=in_one_dtype,
        slack=4.0,  # gradients of weights are sums over all rows
    )
]
