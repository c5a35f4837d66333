"""l2norm against transformers' eager function, torch.compile and a copy of the same bytes."""

import torch
from npu_ops_tools.bench import Benchmark, by_reference, into
from transformers.models.qwen3_next.modeling_qwen3_next import l2norm as hugging_face

import npu_ops
from npu_ops.ops.l2norm import cases

# Qwen3-Next's queries, or keys: 16 heads of 128.
LARGE = cases.Case("qwen3-next-8192", 8192, 16, 128)
SMALL = cases.Case("qwen3-next-64", 64, 16, 128)


def benchmarks(device, quick):
    for case in (SMALL,) if quick else (LARGE, SMALL):
        for dtype in (torch.bfloat16, torch.float32):
            yield forward(case, dtype, device, quick)
            yield forward_backward(case, dtype, device, quick)


def functions(quick):
    chosen = {"npu_ops": npu_ops.l2norm, "eager": hugging_face}
    return chosen if quick else chosen | {"compile": torch.compile(hugging_face)}


def forward(case, dtype, device, quick):
    x = case.inputs(dtype, device)["x"]
    run = {name: lambda f=f: (f(x),) for name, f in functions(quick).items()}
    run["memcpy"] = lambda: (x.clone(),)
    run["memcpy_into"] = into(x)
    return Benchmark(
        "l2norm", case.name, "forward", dtype, {"x": list(x.shape)}, run, "eager", 2 * x.nbytes,
        lambda: (hugging_face(x.double()),), cases.TOLERANCES[dtype].ratio,
    )  # fmt: skip


def forward_backward(case, dtype, device, quick):
    x = case.inputs(dtype, device)["x"].requires_grad_()
    grad = case.inputs(dtype, device, seed=1)["x"]

    def step(function):
        return torch.autograd.grad(function(x), x, grad)

    run = {name: lambda f=f: step(f) for name, f in functions(quick).items()}
    copied = x.detach()
    run["memcpy"] = lambda: (copied.clone(), copied.clone(), copied[: len(copied) // 2].clone())
    return Benchmark(
        "l2norm", case.name, "forward+backward", dtype, {"x": list(x.shape)}, run, "eager",
        5 * x.nbytes, lambda: by_reference("l2norm", run["npu_ops"]), cases.TOLERANCES[dtype].ratio,
    )  # fmt: skip
