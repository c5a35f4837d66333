"""The recurrent gated delta rule against transformers' recurrence."""

import torch
from npu_ops_tools.bench import Benchmark, by_reference
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

import npu_ops
from npu_ops.ops.fused_recurrent_gated_delta_rule import cases

recurrent = getattr(
    qwen3_5.torch_recurrent_gated_delta_rule,
    "__wrapped__",
    qwen3_5.torch_recurrent_gated_delta_rule,
)
LEAVES = ("q", "k", "v", "g", "beta", "initial_state")


def eager(q, k, v, g, beta, initial_state):
    return recurrent(
        q, k, v, g=g, beta=beta, initial_state=initial_state, output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip


def ours(**inputs):
    return npu_ops.fused_recurrent_gated_delta_rule(
        **inputs, output_final_state=True, use_qk_l2norm_in_kernel=True
    )


def benchmarks(device, quick):
    for tokens in (16,) if quick else (16, 128):
        for backward in (False, True):
            yield run(tokens, backward, device)


def run(tokens, backward, device):
    heads = cases.MODELS["qwen3.5-9b-tp1"]
    case = cases.Case("", tokens, *heads)
    given = case.inputs(torch.bfloat16, device)
    inputs = {name: given[name] for name in LEAVES}

    def step(function):
        if not backward:
            return tuple(function(**inputs))
        leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
        o, final = function(**leaves)
        return torch.autograd.grad(
            (o, final), tuple(leaves.values()), (torch.ones_like(o), torch.ones_like(final))
        )

    def expected():
        return by_reference("fused_recurrent_gated_delta_rule", lambda: step(ours))

    providers = {"npu_ops": lambda: step(ours), "eager": lambda: step(eager)}
    moved = sum(x.nbytes for x in inputs.values()) + given["v"].nbytes
    return Benchmark(
        "fused_recurrent_gated_delta_rule", f"qwen3.5-9b-t{tokens}",
        "forward+backward" if backward else "forward", torch.bfloat16,
        {name: list(x.shape) for name, x in inputs.items()}, providers, "eager", moved, expected,
        2 * cases.TOLERANCES[torch.bfloat16].ratio,
    )  # fmt: skip
