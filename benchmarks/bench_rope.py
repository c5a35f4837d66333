"""Compare rotary embedding with transformers' function, and with Megatron's from angles."""

import dataclasses

import torch
from npu_ops_tools.bench import Sweep
from npu_ops_tools.bench.peers import ON_GPUS, SGLANG, megatron
from npu_ops_tools.bench.sweep import first_case
from transformers.models.qwen3_next.modeling_qwen3_next import apply_rotary_pos_emb

from npu_ops.ops.rope import cases

MODELS = ("qwen3-vl-8b", "qwen3.5-9b", "qwen3-next-80b-a3b", "qwen3.5-35b-a3b")


def of_hugging_face(inputs):
    """Return q and k as [B, N, S, D] views of [B, S, N, D] memory, and tables in their dtype."""
    q, k = (inputs[x][None].transpose(1, 2) for x in "qk")
    cos, sin = (inputs[x][None].to(q.dtype) for x in ("cos", "sin"))
    return {"q": q, "k": k, "cos": cos, "sin": sin}


@dataclasses.dataclass(frozen=True)
class Angles(cases.Case):
    """A case as in Megatron: q, k are [S, B, N, D]; each layer computes cos and sin of `freqs`."""

    function = "apply_rotary_pos_emb_freqs"

    def inputs(self, dtype, device="cpu", seed=0):
        made = super().inputs(dtype, device, seed)
        freqs = torch.atan2(made["sin"], made["cos"])
        return {"q": made["q"][:, None], "k": made["k"][:, None], "freqs": freqs[:, None, None]}


def of_angles(op, model, size):
    case = first_case(op, model, size)
    return Angles(**dataclasses.asdict(case))


def megatrons():
    rotate = megatron("models.common.embeddings.rope_utils", "_apply_rotary_pos_emb_bshd")

    def run(q, k, freqs):
        return rotate(q, freqs), rotate(k, freqs)

    return run


SWEEPS = [
    Sweep(
        "rope",
        peers={
            "transformers": lambda: apply_rotary_pos_emb,
            "SGLang": SGLANG,
            "Liger": ON_GPUS,
            "flash-attn": ON_GPUS,
        },
        compiled="transformers",
        models=MODELS,
        prepare=of_hugging_face,
    ),
    Sweep(
        "rope",
        peers={"Megatron": megatrons},
        compiled="Megatron",
        label="from angles",
        models=MODELS,
        case=of_angles,
    ),
]
