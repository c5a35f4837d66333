"""The fused front end against its three parts (ours too), torch's, and a copy of the bytes."""

import torch
import torch.nn.functional as F
from npu_ops_tools.bench import Benchmark, by_reference, into

import npu_ops
from npu_ops.ops.causal_conv1d_qkv import cases


def benchmarks(device, quick):
    for name in ("qwen3-next-t64",) if quick else ("qwen3-next-t4096", "qwen3-next-t64"):
        case = next(case for case in cases.CASES if case.name == name)
        for dtype in (torch.bfloat16, torch.float32):
            yield forward(case, dtype, device, quick)
            if not quick:
                yield forward_backward(case, dtype, device)


def split(y, heads):
    key_heads, value_heads, key_dim, value_dim = heads
    keys = key_heads * key_dim
    q, k, v = y.split([keys, keys, value_heads * value_dim], dim=-1)
    return (part.unflatten(-1, (-1, dim)) for part, dim in
            zip((q, k, v), (key_dim, key_dim, value_dim), strict=True))  # fmt: skip


def parts(heads):
    """causal_conv1d, split, l2norm; v in one piece, as the delta rule reads it."""

    def run(x, weight):
        q, k, v = split(npu_ops.causal_conv1d(x, weight, activation="silu")[0], heads)
        return npu_ops.l2norm(q), npu_ops.l2norm(k), v.contiguous()

    return run


def eager(heads):
    """The layer of Hugging Face's Qwen3-Next without a kernel."""

    def norm(x):
        return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)

    def run(x, weight):
        channels, width = weight.shape
        z = F.conv1d(x.mT, weight[:, None], padding=width - 1, groups=channels)
        q, k, v = split(F.silu(z[..., : x.shape[1]]).mT, heads)
        return norm(q), norm(k), v.contiguous()

    return run


def fused(heads):
    names = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
    settings = dict(zip(names, heads, strict=True))
    return lambda x, weight: npu_ops.causal_conv1d_qkv(x, weight, **settings)[:3]


def functions(heads, quick):
    chosen = {"npu_ops": fused(heads), "parts": parts(heads), "eager": eager(heads)}
    return chosen if quick else chosen | {"compile": torch.compile(eager(heads))}


def forward(case, dtype, device, quick):
    inputs = case.inputs(dtype, device)
    x, weight = inputs["x"], inputs["weight"]
    run = {name: lambda f=f: f(x, weight) for name, f in functions(case.heads, quick).items()}
    run["memcpy"] = x.clone
    run["memcpy_into"] = into(x)
    return Benchmark(
        "causal_conv1d_qkv", case.name, "forward", dtype, {"x": list(x.shape)}, run, "parts",
        2 * x.nbytes + weight.nbytes, lambda: by_reference("causal_conv1d_qkv", run["npu_ops"]),
        cases.TOLERANCES[dtype].ratio,
    )  # fmt: skip


def forward_backward(case, dtype, device):
    inputs = case.inputs(dtype, device)
    x, weight = (inputs[name].requires_grad_() for name in ("x", "weight"))
    with torch.no_grad():
        grads = [torch.randn_like(part) for part in fused(case.heads)(x, weight)]

    def step(function):
        return torch.autograd.grad(function(x, weight), (x, weight), grads)

    run = {name: lambda f=f: step(f) for name, f in functions(case.heads, False).items()}
    return Benchmark(
        "causal_conv1d_qkv", case.name, "forward+backward", dtype, {"x": list(x.shape)}, run,
        "parts", 5 * x.nbytes + 2 * weight.nbytes,  # as causal_conv1d: x twice, grads, q k v, grad
        lambda: by_reference("causal_conv1d_qkv", run["npu_ops"]), cases.TOLERANCES[dtype].ratio,
    )  # fmt: skip
