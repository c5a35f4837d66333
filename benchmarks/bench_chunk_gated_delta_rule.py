"""The chunked gated delta rule against transformers' chunks, and fla's naive ones in fp32.

fla needs `python tests/adapters/fetch_frameworks.py fla-core-0.6.0`; without it they are left out.
"""

import importlib.util

import torch
from npu_ops_tools import where
from npu_ops_tools.bench import Benchmark
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

import npu_ops
from npu_ops.ops.chunk_gated_delta_rule import cases

chunk = getattr(
    qwen3_5.torch_chunk_gated_delta_rule, "__wrapped__", qwen3_5.torch_chunk_gated_delta_rule
)
LEAVES = ("q", "k", "v", "g", "beta", "initial_state")
# The package asks for a GPU as it is imported; this file of it does not.
NAIVE = ".cache/frameworks/fla-core-0.6.0/fla/ops/gated_delta_rule/naive.py"


def naive(q, k, v, g, beta, initial_state):
    spec = importlib.util.spec_from_file_location("fla_naive", where.ROOT / NAIVE)
    fla = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fla)
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    return fla.naive_chunk_gated_delta_rule(
        q, k, v, g, beta, initial_state=initial_state, output_final_state=True
    )


def eager(q, k, v, g, beta, initial_state):
    return chunk(
        q, k, v, g=g, beta=beta, initial_state=initial_state, output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip


def ours(**inputs):
    return npu_ops.chunk_gated_delta_rule(
        **inputs, output_final_state=True, use_qk_l2norm_in_kernel=True
    )


def benchmarks(device, quick):
    shapes = (("qwen3.5-9b-tp1", 128),) if quick else MODELS
    for model, tokens in shapes:
        for dtype in (torch.float32, torch.bfloat16):
            for backward in (False, True):
                yield run(model, tokens, dtype, backward, device)


MODELS = (("qwen3.5-9b-tp1", 1024), ("qwen3.5-9b-tp1", 4096), ("qwen3-next-80b-tp4", 4096))


def run(model, tokens, dtype, backward, device):
    given = cases.model_case(model, tokens).inputs(dtype, device)
    inputs = {name: given[name] for name in LEAVES}

    def step(function, inputs=inputs):
        if not backward:
            with torch.no_grad():
                return tuple(function(**inputs))
        leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
        o, final = function(**leaves)
        return torch.autograd.grad(
            (o, final), tuple(leaves.values()), (torch.ones_like(o), torch.ones_like(final))
        )

    def expected():  # in fp32: the recurrence takes minutes and keeps a state for each token
        return step(eager, {name: x.float() for name, x in inputs.items()})

    providers = {"npu_ops": lambda: step(ours), "eager": lambda: step(eager)}
    if dtype == torch.float32 and (where.ROOT / NAIVE).exists():
        providers["fla naive"] = lambda: step(naive)
    moved = sum(x.nbytes for x in inputs.values()) + given["v"].nbytes
    return Benchmark(
        "chunk_gated_delta_rule", f"{model.removesuffix('-tp1')}-t{tokens}",
        "forward+backward" if backward else "forward", dtype,
        {name: list(x.shape) for name, x in inputs.items()}, providers, "eager", moved, expected,
        2 * cases.TOLERANCES[dtype].ratio if dtype != torch.float32 else 5e-4,
    )  # fmt: skip
