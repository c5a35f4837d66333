"""The convolution's decoding step against Hugging Face's, and a copy of the states."""

import torch
from npu_ops_tools.bench import Benchmark, into
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

import npu_ops
from npu_ops.ops.causal_conv1d_update import cases, reference


def benchmarks(device, quick):
    for batch in (1,) if quick else (1, 32):
        case = next(case for case in cases.CASES if case.name == f"qwen3-next-b{batch}")
        for dtype in (torch.bfloat16, torch.float32):
            yield step(case, dtype, device)


def step(case, dtype, device):
    """One token of each sequence. All rows are the same, so that a step leaves the states alike."""
    inputs = case.inputs(dtype, device)
    x, weight = inputs["x"][:, 0], inputs["weight"]
    state = x[..., None].expand(-1, -1, case.width - 1).contiguous()
    pool = state.mT.contiguous().mT

    def ours():
        return npu_ops.causal_conv1d_update(x, pool, weight, None, "silu")

    def eager():
        return qwen3_next.causal_conv1d_update(x[..., None], state, weight, None, "silu")[..., 0]

    def expected():
        rest = (None, None, None, None, None, None, -1, True, False)
        return reference.causal_conv1d_update(x[:, None], pool, weight, *rest)[:, 0]

    run = {"npu_ops": ours, "eager": eager, "memcpy_into": into(state)}
    moved = 2 * x.nbytes + 2 * state.nbytes + weight.nbytes
    return Benchmark(
        "causal_conv1d_update", case.name, "forward", dtype, {"x": list(x.shape)}, run, "eager",
        moved, expected, cases.TOLERANCES[dtype].ratio,
    )  # fmt: skip
