"""qk_norm_rope against transformers' formula, torch.compile of it, and our norms and rope apart."""

import dataclasses

import torch
from npu_ops_tools.bench import Benchmark, by_reference
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

import npu_ops
from npu_ops.core.models import MODELS
from npu_ops.ops.qk_norm_rope import cases

NAMES = ("qwen3-8b", "qwen3.5-9b")


def eager(qkv, q_weight, k_weight, cos, sin, case):
    """As transformers' Qwen3Attention and Qwen3_5Attention have it, by one axis."""
    q, k, v, gate = split(qkv, case)
    q, k = norm(q, q_weight, case), norm(k, k_weight, case)
    width = case.rotary_dim
    turned = apply_rotary_pos_emb(q[..., :width], k[..., :width], cos, sin, unsqueeze_dim=-2)
    if width < case.head_dim:
        turned = (
            torch.cat((y, x[..., width:]), dim=-1) for x, y in zip((q, k), turned, strict=True)
        )
    return *turned, v, gate


def split(qkv, case):
    queries = case.num_heads * (2 if case.gated else 1)
    heads = qkv.unflatten(-1, (-1, case.head_dim))
    q, k, v = heads.split([queries, case.num_kv_heads, case.num_kv_heads], dim=-2)
    return (q[..., 0::2, :], k, v, q[..., 1::2, :]) if case.gated else (q, k, v, None)


def norm(x, weight, case):
    """Qwen3RMSNorm's and Qwen3NextRMSNorm's."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    if case.zero_centered:
        return (wide * (1 + weight.float())).to(x.dtype)
    return weight * wide.to(x.dtype)


def apart(qkv, q_weight, k_weight, cos, sin, case):
    """Norms by torch, then our rope."""
    q, k, v, gate = split(qkv, case)
    q, k = norm(q, q_weight, case), norm(k, k_weight, case)
    q, k = npu_ops.apply_rotary_pos_emb(
        q, k, cos, sin, layout="TND", rotary_dim=case.rotary_dim, inplace=not q.requires_grad
    )
    return q, k, v, gate


def fused(qkv, q_weight, k_weight, cos, sin, case):
    return npu_ops.qk_norm_rope(
        qkv, q_weight, k_weight, cos, sin, num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads, zero_centered=case.zero_centered, gated=case.gated,
        rotary_dim=case.rotary_dim, copy_rest=qkv.requires_grad,
    )  # fmt: skip


def benchmarks(device, quick):
    for name in NAMES[:1] if quick else NAMES:
        for tokens in (64,) if quick else (8192, 64):
            case = cases.model_case(f"{name}-t{tokens}", MODELS[name], tokens)
            case = dataclasses.replace(case, section=None)  # text: the formula of one axis
            for dtype in (torch.bfloat16, torch.float32):
                yield benchmark(case, dtype, device, quick, train=False)
                yield benchmark(case, dtype, device, quick, train=True)


def benchmark(case, dtype, device, quick, train):
    given = case.inputs(dtype, device)
    inputs = [given[name] for name in ("qkv", "q_weight", "k_weight", "cos", "sin")]
    inputs[3:] = (table.to(dtype) for table in inputs[3:])
    leaves = [x.requires_grad_(train) for x in inputs[:3]]
    chosen = {"npu_ops": fused, "eager": eager, "apart": apart}
    chosen |= {} if quick else {"compile": torch.compile(eager)}
    grads = [torch.randn_like(x) for x in fused(*inputs, case) if x is not None] if train else []

    def step(function):
        outputs = [x for x in function(*inputs, case) if x is not None]
        return tuple(torch.autograd.grad(outputs, leaves, grads) if train else outputs)

    run = {name: lambda f=f: step(f) for name, f in chosen.items()}
    qkv = inputs[0].detach()
    run["memcpy"] = lambda: tuple(qkv.clone() for _ in range(3 if train else 1))
    return Benchmark(
        "qk_norm_rope", case.name, "forward+backward" if train else "forward",
        dtype, {"qkv": list(qkv.shape)}, run, "eager", (5 if train else 2) * qkv.nbytes,
        lambda: by_reference("qk_norm_rope", run["npu_ops"]), cases.TOLERANCES[dtype].ratio,
    )  # fmt: skip
