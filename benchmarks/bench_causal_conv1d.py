"""The causal convolution against torch's (transpose, F.conv1d, silu) and a copy of the bytes."""

import torch
import torch.nn.functional as F
from npu_ops_tools.bench import Benchmark, by_reference, into

import npu_ops
from npu_ops.ops.causal_conv1d import cases


def benchmarks(device, quick):
    for name in ("qwen3-next-t64",) if quick else ("qwen3-next-t4096", "qwen3-next-t64"):
        case = next(case for case in cases.CASES if case.name == name)
        for dtype in (torch.bfloat16, torch.float32):
            yield forward(case, dtype, device, quick)
            if not quick:
                yield forward_backward(case, dtype, device)


def eager(x, weight):
    """The layer of Hugging Face's Qwen3-Next without a kernel."""
    channels, width = weight.shape
    z = F.conv1d(x.mT, weight[:, None], padding=width - 1, groups=channels)
    return F.silu(z[..., : x.shape[1]]).mT


def ours(x, weight):
    return npu_ops.causal_conv1d(x, weight, activation="silu")[0]


def functions(quick):
    chosen = {"npu_ops": ours, "eager": eager}
    return chosen if quick else chosen | {"compile": torch.compile(eager)}


def forward(case, dtype, device, quick):
    inputs = case.inputs(dtype, device)
    x, weight = inputs["x"], inputs["weight"]
    run = {name: lambda f=f: f(x, weight) for name, f in functions(quick).items()}
    run["memcpy"] = x.clone
    run["memcpy_into"] = into(x)
    return Benchmark(
        "causal_conv1d", case.name, "forward", dtype, {"x": list(x.shape)}, run, "eager",
        2 * x.nbytes + weight.nbytes, lambda: by_reference("causal_conv1d", run["npu_ops"]),
        cases.TOLERANCES[dtype].ratio,
    )  # fmt: skip


def forward_backward(case, dtype, device):
    inputs = case.inputs(dtype, device)
    x, weight = (inputs[name].requires_grad_() for name in ("x", "weight"))
    grad = torch.randn_like(x)

    def step(function):
        return torch.autograd.grad(function(x, weight), (x, weight), grad)

    run = {name: lambda f=f: step(f) for name, f in functions(False).items()}
    return Benchmark(
        "causal_conv1d", case.name, "forward+backward", dtype, {"x": list(x.shape)}, run, "eager",
        5 * x.nbytes + 2 * weight.nbytes,  # reads x twice, grad once, writes y and x's gradient
        lambda: by_reference("causal_conv1d", run["npu_ops"]), cases.TOLERANCES[dtype].ratio,
    )  # fmt: skip
