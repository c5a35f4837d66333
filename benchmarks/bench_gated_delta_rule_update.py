"""Compare the decoding step with transformers' recurrence on states gathered from the same pool."""

import dataclasses

import torch
import torch.nn.functional as F
from npu_ops_tools.bench import Sweep
from npu_ops_tools.bench.peers import ON_GPUS, ON_NPUS, SGLANG
from npu_ops_tools.bench.sweep import of_sequences
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

recurrent = getattr(
    qwen3_5.torch_recurrent_gated_delta_rule,
    "__wrapped__",
    qwen3_5.torch_recurrent_gated_delta_rule,
)


def of_pool(pool):
    """Return a function that makes cases with states of dtype `pool`, [K, V] as in transformers."""

    def case(op, model, size):
        found = of_sequences(op, model, size)
        return found and dataclasses.replace(found, v_first=False, pool=pool)

    return case


def all_decode(inputs):
    """Let every sequence decode: the case skips every third, which transformers cannot do."""
    slots, batch = inputs["state"].shape[0], inputs["qkv"].shape[0]
    inputs["state_indices"] = torch.arange(slots - 1, slots - 1 - batch, -1).to(
        inputs["state_indices"]
    )
    del inputs["cu_seqlens"], inputs["disable_state_update"]
    return inputs


def transformers(qkv, a, b, A_log, dt_bias, state, state_indices, state_v_first):
    """Compute the decoding step in transformers, from the convolution's output to o."""
    value_heads, keys, values = state.shape[1:]
    key_width = (qkv.shape[1] - value_heads * values) // 2
    q, k, v = qkv[:, None].split((key_width, key_width, value_heads * values), -1)
    g = -A_log.exp() * F.softplus(a.float() + dt_bias)
    o, final = recurrent(
        *(x.unflatten(-1, (-1, keys)) for x in (q, k)), v.unflatten(-1, (value_heads, values)),
        g=g[:, None], beta=b.sigmoid()[:, None], initial_state=state[state_indices].float(),
        output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    state[state_indices] = final.to(state.dtype)
    return o[:, 0]


def moved(case, inputs):
    """Return the bytes of the batch's states, read and written, and of qkv and o."""
    return 2 * case.sequences * inputs["state"][0].nbytes + 2 * inputs["qkv"].nbytes


SWEEPS = [
    Sweep(
        "gated_delta_rule_update",
        peers={
            "transformers": lambda: transformers,
            "SGLang": SGLANG,
            "fla": ON_GPUS,
            "sgl-kernel-npu": ON_NPUS,
        },
        label=f"{name} states",
        prepare=all_decode,
        case=of_pool(pool),
        unit="sequences",
        sizes=(1, 4, 16, 64, 128),
        backward_to=0,
        exact_to=64,
        moved=moved,
        writes=("state",),
    )
    for name, pool in (("fp32", torch.float32), ("bf16", torch.bfloat16))
]
