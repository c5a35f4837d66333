"""Compare multimodal rotary embedding with transformers', which merges three tables first."""

from npu_ops_tools.bench import Sweep
from npu_ops_tools.bench.peers import ON_GPUS, SGLANG
from transformers.models.qwen3_next.modeling_qwen3_next import apply_rotary_pos_emb


def of_hugging_face(inputs):
    """Return q and k as [B, N, S, D] views of [B, S, N, D] memory, and tables in their dtype."""
    q, k = (inputs[x][None].transpose(1, 2) for x in "qk")
    cos, sin = (inputs[x][:, None].to(q.dtype) for x in ("cos", "sin"))
    settings = {name: inputs[name] for name in ("mrope_section", "section_layout")}
    return {"q": q, "k": k, "cos": cos, "sin": sin} | settings


def transformers(q, k, cos, sin, mrope_section, section_layout):
    """Merge the tables and rotate, as each layer of Qwen3-VL and Qwen3.5 does."""
    return apply_rotary_pos_emb(q, k, merged(cos, mrope_section), merged(sin, mrope_section))


def merged(table, section):
    half = table.shape[-1] // 2
    rows = table[0].clone()
    for axis in (1, 2):
        for start in (0, half):
            columns = slice(start + axis, start + 3 * section[axis], 3)
            rows[..., columns] = table[axis][..., columns]
    return rows


SWEEPS = [
    Sweep(
        "mrope",
        peers={"transformers": lambda: transformers, "SGLang": SGLANG, "Liger": ON_GPUS},
        compiled="transformers",
        models=("qwen3-vl-8b", "qwen3.5-9b", "qwen3.5-35b-a3b"),
        prepare=of_hugging_face,
    )
]
