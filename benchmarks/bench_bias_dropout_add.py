"""bias_dropout_add against eager torch, torch.compile and a copy of the same bytes."""

import torch
import torch.nn.functional as F
from npu_ops_tools.bench import Benchmark, by_reference, into

import npu_ops
from npu_ops.core import rng
from npu_ops.ops.bias_dropout_add import cases, reference

LARGE = cases.Case("megatron-train-8192", 8192, 4096)
SMALL = cases.Case("qwen3-vl-8b-decode-64", 64, 4096)


def eager(x, bias, residual, p, training):
    """What Megatron's unfused path does."""
    return residual + F.dropout(x + bias, p, training)


def benchmarks(device, quick):
    for case in (SMALL,) if quick else (LARGE, SMALL):
        for dtype in (torch.bfloat16, torch.float32):
            for p in (0.1, 0.0):
                yield forward(case, dtype, p, device)
            yield forward_backward(case, dtype, 0.1, device, quick)


def providers(quick):
    functions = {"npu_ops": npu_ops.bias_dropout_add, "eager": eager}
    return functions if quick else functions | {"compile": torch.compile(eager)}


def forward(case, dtype, p, device):
    arguments = case.inputs(dtype, device) | {"p": p}
    size = arguments["x"].nbytes
    run = {name: lambda f=f: (f(**arguments),) for name, f in providers(quick=True).items()}
    x, residual = arguments["x"], arguments["residual"]
    copied = (x, residual[: len(residual) // 2])
    run["memcpy"] = lambda: tuple(t.clone() for t in copied)
    run["memcpy_into"] = into(*copied)

    def expected():
        state = rng.new_state(x.device, None) if p else None
        tensors = (arguments["x"], arguments["bias"], arguments["residual"])
        return (reference.bias_dropout_add(*tensors, state, p),)

    return Benchmark(
        "bias_dropout_add", case.name, f"forward p={p}", dtype, {"x": list(x.shape)}, run, "eager",
        3 * size, expected, cases.TOLERANCES[dtype].ratio,
    )  # fmt: skip


def forward_backward(case, dtype, p, device, quick):
    arguments = case.inputs(dtype, device) | {"p": p}
    leaves = [arguments[name].requires_grad_() for name in ("x", "bias", "residual")]
    grad = torch.randn_like(arguments["x"])

    def step(function):
        output = function(**arguments)
        return torch.autograd.grad(output, leaves, grad)

    run = {name: lambda f=f: step(f) for name, f in providers(quick).items()}
    # Forward moves three times x's bytes, backward two: the gradient is read, and written for x.
    x = arguments["x"].detach()
    run["memcpy"] = lambda: (x.clone(), x.clone(), x[: len(x) // 2].clone())
    return Benchmark(
        "bias_dropout_add", case.name, f"forward+backward p={p}", dtype, {"x": list(x.shape)}, run,
        "eager", 5 * x.nbytes, lambda: by_reference("bias_dropout_add", run["npu_ops"]),
        cases.SUM_TOLERANCES[dtype].ratio,
    )  # fmt: skip
