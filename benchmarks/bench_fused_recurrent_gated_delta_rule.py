"""Compare the recurrent gated delta rule with transformers' recurrence."""

from npu_ops_tools.bench import Sweep
from npu_ops_tools.bench.peers import ON_GPUS, fla_naive
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

from npu_ops.core.models import LINEAR_DIM
from npu_ops.ops.fused_recurrent_gated_delta_rule import cases

recurrent = getattr(
    qwen3_5.torch_recurrent_gated_delta_rule,
    "__wrapped__",
    qwen3_5.torch_recurrent_gated_delta_rule,
)
TENSORS = ("q", "k", "v", "g", "beta", "initial_state")
SETTINGS = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}


def of_tokens(op, model, size):
    dims = LINEAR_DIM, LINEAR_DIM
    return cases.Case("", size, *model.linear, *dims) if model.linear else None


def as_layers_call_it(inputs):
    return {name: inputs[name] for name in TENSORS} | SETTINGS


def transformers(q, k, v, g, beta, **rest):
    return recurrent(q, k, v, g=g, beta=beta, **rest)


def naive():
    function = fla_naive("naive_recurrent_gated_delta_rule")

    def run(q, k, v, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel):
        times = v.shape[2] // q.shape[2]
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        q, k = (x.repeat_interleave(times, dim=2) for x in (q, k))
        o, final = function(
            q, k, v, beta, g, initial_state=initial_state, output_final_state=output_final_state
        )
        return o.to(v.dtype), final

    return run


SWEEPS = [
    Sweep(
        "fused_recurrent_gated_delta_rule",
        peers={"transformers": lambda: transformers, "fla naive": naive, "fla": ON_GPUS},
        prepare=as_layers_call_it,
        case=of_tokens,
        sizes=(1, 4, 16, 64, 256),
        backward_to=64,
        exact_to=16,  # see bench_chunk_gated_delta_rule.py
        beyond="transformers",
        at_most={"fla naive": 64},
        flop=lambda case: 7 * case.tokens * case.value_heads * case.keys * case.values,
    )
]
