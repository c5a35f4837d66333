"""Compare Kimi Delta Attention with fla's in PyTorch."""

import torch.nn.functional as F
from npu_ops_tools.bench import Sweep
from npu_ops_tools.bench.peers import ON_GPUS, fla_naive

TENSORS = ("q", "k", "v", "g", "beta", "initial_state")
SETTINGS = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}


def as_layers_call_it(inputs):
    return {name: inputs[name] for name in TENSORS} | SETTINGS


def naive():
    function = fla_naive("naive_recurrent_kda", "kda")

    def run(q, k, v, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel):
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        return function(
            q, k, v, g, beta, initial_state=initial_state, output_final_state=output_final_state
        )

    return run


SWEEPS = [
    Sweep(
        "chunk_kda",
        peers={"fla naive": naive, "fla": ON_GPUS},
        prepare=as_layers_call_it,
        sizes=(16, 64, 256, 1024, 4096),
        backward_to=1024,
        exact_to=16,  # the reference goes token by token, and keeps all states
        at_most={"fla naive": 256},
        flop=lambda case: 7 * case.tokens * case.value_heads * case.keys * case.values,
    )
]
