"""Compare chunk_gated_delta_rule with the PyTorch functions of transformers, Megatron and fla."""

import torch.nn.functional as F
from npu_ops_tools.bench import Sweep
from npu_ops_tools.bench.peers import ON_GPUS, ON_NPUS, SGLANG, fla_naive, megatron
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_next.modeling_qwen3_next import l2norm

chunk = getattr(
    qwen3_5.torch_chunk_gated_delta_rule, "__wrapped__", qwen3_5.torch_chunk_gated_delta_rule
)
TENSORS = ("q", "k", "v", "g", "beta", "initial_state")
SETTINGS = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}


def as_layers_call_it(inputs):
    return {name: inputs[name] for name in TENSORS} | SETTINGS


def transformers(q, k, v, g, beta, **rest):
    return chunk(q, k, v, g=g, beta=beta, **rest)


def megatrons():
    function = megatron("ssm.gated_delta_net", "torch_chunk_gated_delta_rule")

    def run(q, k, v, g, beta, use_qk_l2norm_in_kernel, **rest):
        # the function's own l2norm is fla's, which needs a GPU
        q, k = repeated(l2norm(q), l2norm(k), v)
        return function(q, k, v, g=g, beta=beta, **rest)

    return run


def naive():
    function = fla_naive("naive_chunk_gated_delta_rule")

    def run(q, k, v, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel):
        q, k = repeated(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v)
        o, final = function(
            q, k, v, g, beta, initial_state=initial_state, output_final_state=output_final_state
        )
        return o.to(v.dtype), final

    return run


def repeated(q, k, v):
    """Repeat the key heads so that each value head has one of its own."""
    times = v.shape[2] // q.shape[2]
    return q.repeat_interleave(times, dim=2), k.repeat_interleave(times, dim=2)


SWEEPS = [
    Sweep(
        "chunk_gated_delta_rule",
        peers={
            "transformers": lambda: transformers,
            "Megatron": megatrons,
            "fla naive": naive,
            "fla": ON_GPUS,
            "SGLang": SGLANG,
            "fla_npu": ON_NPUS,
        },
        prepare=as_layers_call_it,
        sizes=(16, 64, 256, 1024, 4096),
        backward_to=1024,
        exact_to=16,  # the reference goes token by token, and keeps all states
        beyond="transformers",
        at_most={"fla naive": 1024, "Megatron": 1024},
        flop=lambda case: 7 * case.tokens * case.value_heads * case.keys * case.values,
    )
]
