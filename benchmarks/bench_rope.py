"""Rotary embedding against Hugging Face's eager function, torch.compile and a copy of the bytes."""

import torch
from npu_ops_tools.bench import Benchmark, by_reference, into
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb as hugging_face

import npu_ops
from npu_ops.ops.rope import cases, reference


def benchmarks(device, quick):
    for tokens in (64,) if quick else (8192, 64):
        case = cases.model_case("qwen3-vl-8b", tokens, 1, layout="BSND")
        for dtype in (torch.bfloat16, torch.float32):
            yield forward(case, dtype, device, quick)
            if not quick:
                yield forward_backward(case, dtype, device)


def inputs(case, dtype, device):
    """q and k as a Hugging Face model has them: [B, N, S, D], laid out as [B, S, N, D]."""
    made = case.inputs(dtype, device)
    q, k = made["q"].transpose(1, 2), made["k"].transpose(1, 2)
    return q, k, made["cos"].to(dtype), made["sin"].to(dtype)


def functions(quick):
    chosen = {"npu_ops": npu_ops.apply_rotary_pos_emb, "eager": hugging_face}
    return chosen if quick else chosen | {"compile": torch.compile(hugging_face)}


def forward(case, dtype, device, quick):
    arguments = inputs(case, dtype, device)
    q, k, cos, sin = arguments
    run = {name: lambda f=f: f(*arguments) for name, f in functions(quick).items()}
    run["in_place"] = lambda: npu_ops.apply_rotary_pos_emb(*arguments, inplace=True)
    run["memcpy"] = lambda: (q.clone(), k.clone())
    run["memcpy_into"] = into(q, k)

    def expected():
        wide = (q.float(), k.float(), cos, sin)
        return reference.rope(*wide, None, "BNSD", "half", False, case.rotary_dim)

    return Benchmark(
        "rope", case.name, "forward", dtype, {"q": list(q.shape), "k": list(k.shape)}, run, "eager",
        2 * (q.nbytes + k.nbytes) + cos.nbytes + sin.nbytes, expected,
        cases.TOLERANCES[dtype].ratio,
    )  # fmt: skip


def forward_backward(case, dtype, device):
    q, k, cos, sin = inputs(case, dtype, device)
    q.requires_grad_(), k.requires_grad_()
    grads = (torch.randn_like(q), torch.randn_like(k))

    def step(function):
        return torch.autograd.grad(function(q, k, cos, sin), (q, k), grads)

    run = {name: lambda f=f: step(f) for name, f in functions(False).items()}
    copied = (q.detach(), k.detach(), *grads)
    run["memcpy"] = lambda: tuple(t.clone() for t in copied)
    moved = 2 * sum(t.nbytes for t in copied) + 2 * (cos.nbytes + sin.nbytes)
    return Benchmark(
        "rope", case.name, "forward+backward", dtype, {"q": list(q.shape), "k": list(k.shape)}, run,
        "eager", moved, lambda: by_reference("rope", run["npu_ops"]), cases.TOLERANCES[dtype].ratio,
    )  # fmt: skip
