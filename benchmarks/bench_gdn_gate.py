"""gdn_gate against transformers' eager formula, torch.compile and a copy of the same bytes."""

import torch
import torch.nn.functional as F
from npu_ops_tools.bench import Benchmark, by_reference

import npu_ops
from npu_ops.ops.gdn_gate import cases, reference

# Qwen3-Next's 32 value heads.
LARGE = cases.Case("qwen3-next-8192", 8192, 32)
SMALL = cases.Case("qwen3-next-64", 64, 32)
WRT = cases.DIFFERENTIABLE


def eager(a, A_log, dt_bias, b):
    """The two lines of transformers' Qwen3NextGatedDeltaNet."""
    beta = b.sigmoid()
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias)
    return g, beta


def benchmarks(device, quick):
    for case in (SMALL,) if quick else (LARGE, SMALL):
        for dtype in (torch.bfloat16, torch.float32):
            yield forward(case, dtype, device, quick)
            yield forward_backward(case, dtype, device, quick)


def functions(quick):
    chosen = {"npu_ops": npu_ops.gdn_gate, "eager": eager}
    return chosen if quick else chosen | {"compile": torch.compile(eager)}


def inputs(case, dtype, device):
    made = case.inputs(dtype, device)
    return [made[name] for name in WRT]


def forward(case, dtype, device, quick):
    arguments = inputs(case, dtype, device)
    a, *_, b = arguments
    run = {name: lambda f=f: f(*arguments) for name, f in functions(quick).items()}
    run["memcpy"] = lambda: (a.float(), b.clone())

    def expected():
        return reference.gdn_gate(*(tensor.double() for tensor in arguments), 1.0)

    moved = a.nbytes + 2 * b.nbytes + 4 * a.numel()
    return Benchmark(
        "gdn_gate", case.name, "forward", dtype, {"a": list(a.shape)}, run, "eager", moved,
        expected, cases.TOLERANCES[dtype].ratio,
    )  # fmt: skip


def forward_backward(case, dtype, device, quick):
    leaves = [tensor.detach().requires_grad_() for tensor in inputs(case, dtype, device)]
    a, *_, b = (leaf.detach() for leaf in leaves)
    grads = torch.randn(a.shape, device=device), torch.randn_like(b)

    def step(function):
        return torch.autograd.grad(function(*leaves), leaves, grads)

    run = {name: lambda f=f: step(f) for name, f in functions(quick).items()}
    run["memcpy"] = lambda: (a.float(), b.clone(), a.float(), a.clone(), b.clone())
    moved = 3 * a.nbytes + 5 * b.nbytes + 8 * a.numel()
    return Benchmark(
        "gdn_gate", case.name, "forward+backward", dtype, {"a": list(a.shape)}, run, "eager",
        moved, lambda: by_reference("gdn_gate", run["npu_ops"]), cases.TOLERANCES[dtype].ratio,
    )  # fmt: skip
