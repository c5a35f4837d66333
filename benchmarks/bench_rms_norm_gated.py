"""rms_norm_gated against transformers' eager module, torch.compile and a copy of the same bytes."""

import torch
from npu_ops_tools.bench import Benchmark, by_reference, into
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

import npu_ops
from npu_ops.ops.rms_norm_gated import cases, reference

# Qwen3-Next's 32 value heads of 128.
LARGE = cases.Case("qwen3-next-8192", 8192, 32, 128)
SMALL = cases.Case("qwen3-next-64", 64, 32, 128)


def benchmarks(device, quick):
    for case in (SMALL,) if quick else (LARGE, SMALL):
        for dtype in (torch.bfloat16, torch.float32):
            yield forward(case, dtype, device, quick)
            yield forward_backward(case, dtype, device, quick)


def functions(x, weight, quick):
    """name -> function of x and z; the module has the same weight."""
    module = Qwen3NextRMSNormGated(x.shape[-1]).to(x.device)
    module.weight = torch.nn.Parameter(weight)
    chosen = {"npu_ops": lambda x, z: npu_ops.rms_norm_gated(x, module.weight, z), "eager": module}
    return module.weight, chosen if quick else chosen | {"compile": torch.compile(module)}


def forward(case, dtype, device, quick):
    inputs = case.inputs(dtype, device)
    x, weight, z = (inputs[name] for name in cases.DIFFERENTIABLE)
    _, chosen = functions(x, weight, quick)

    def step(function):
        with torch.no_grad():
            return (function(x, z),)

    run = {name: lambda f=f: step(f) for name, f in chosen.items()}
    copied = x, z[: len(z) // 2]
    run["memcpy"] = lambda: tuple(tensor.clone() for tensor in copied)
    run["memcpy_into"] = into(*copied)

    def expected():
        wide = x.double(), weight.double(), z.double()
        return (reference.rms_norm_gated(*wide, 1e-6, True, "silu"),)

    return Benchmark(
        "rms_norm_gated", case.name, "forward", dtype, {"x": list(x.shape)}, run, "eager",
        3 * x.nbytes, expected, cases.TOLERANCES[dtype].ratio,
    )  # fmt: skip


def forward_backward(case, dtype, device, quick):
    inputs = case.inputs(dtype, device)
    x, z = inputs["x"].requires_grad_(), inputs["z"].detach().requires_grad_()
    grad = case.inputs(dtype, device, seed=1)["x"]
    weight, chosen = functions(x, inputs["weight"], quick)

    def step(function):
        return torch.autograd.grad(function(x, z), (x, weight, z), grad)

    run = {name: lambda f=f: step(f) for name, f in chosen.items()}
    copied = x.detach()
    run["memcpy"] = lambda: tuple(copied.clone() for _ in range(4))
    return Benchmark(
        "rms_norm_gated", case.name, "forward+backward", dtype, {"x": list(x.shape)}, run, "eager",
        8 * x.nbytes, lambda: by_reference("rms_norm_gated", run["npu_ops"]),
        cases.TOLERANCES[dtype].ratio,
    )  # fmt: skip
