"""Tiny random models of transformers 4.57 and 5, and one step of each without and with npu-ops.

python transformers_models.py NAME...   in one process; prints a line of JSON for each
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback

import npu_ops_adapters
import npu_ops_import_hook
import torch
from npu_ops_tools.demo_model import Counter

from npu_ops.core.compare import Tolerance, assert_close

SIZES = {
    "vocab_size": 64, "hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1, "norm_topk_prob": True,
}  # fmt: skip
LINEAR = {
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
VISION = {
    "depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 24, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 48,
}  # fmt: skip
TOKENS = {
    "image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62,
    "vision_end_token_id": 63,
}  # fmt: skip
IMAGES = torch.tensor([[1, 4, 6], [1, 4, 4]])


def is_version_4() -> bool:
    import transformers

    return transformers.__version__.startswith("4.")


def rotary(section=None, partial=1.0) -> dict:
    """The settings of rope as this version takes them."""
    parameters = {"rope_type": "default"}
    if section:
        parameters |= {"mrope_section": section, "mrope_interleaved": True}
    if is_version_4():
        scaling = {"rope_scaling": parameters} if section else {}
        return scaling | {"rope_theta": 1e4, "partial_rotary_factor": partial}
    parameters |= {"rope_theta": 1e4, "partial_rotary_factor": partial}
    return {"rope_parameters": parameters}


def classes(model: str):
    """The modeling and the configuration module of a model."""
    home = f"transformers.models.{model}"
    return (
        importlib.import_module(f"{home}.{kind}_{model}") for kind in ("modeling", "configuration")
    )


def text_inputs(batch=2, length=70) -> dict:
    draw = torch.Generator().manual_seed(1)
    return {"input_ids": torch.randint(59, (batch, length), generator=draw)}


def image_inputs() -> dict:
    """Text with two images of different sizes in each sequence."""
    inputs = text_inputs(length=40)
    ids, patches = inputs["input_ids"], 0
    for row in range(len(ids)):
        at = 3
        for _, height, width in IMAGES.tolist():
            tokens = height * width // 4
            ids[row, at] = 62
            ids[row, at + 1 : at + 1 + tokens] = 60
            ids[row, at + 1 + tokens] = 63
            at += tokens + 5
            patches += height * width
    draw = torch.Generator().manual_seed(2)
    inputs["pixel_values"] = torch.randn(patches, 3 * 2 * 4 * 4, generator=draw)
    inputs["image_grid_thw"] = IMAGES.repeat(len(ids), 1)
    if not is_version_4():
        inputs["mm_token_type_ids"] = (ids == 60).int()
    return inputs


def qwen3():
    modeling, configuration = classes("qwen3")
    config = configuration.Qwen3Config(**SIZES, head_dim=16, **rotary())
    return modeling.Qwen3ForCausalLM(config), text_inputs()


def qwen3_moe():
    modeling, configuration = classes("qwen3_moe")
    config = configuration.Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16, **rotary())
    return modeling.Qwen3MoeForCausalLM(config), text_inputs()


def qwen2():
    modeling, configuration = classes("qwen2")
    return modeling.Qwen2ForCausalLM(configuration.Qwen2Config(**SIZES, **rotary())), text_inputs()


def qwen3_next():
    modeling, configuration = classes("qwen3_next")
    config = configuration.Qwen3NextConfig(
        **SIZES, **EXPERTS, **LINEAR, head_dim=32, **rotary(partial=0.25)
    )
    return modeling.Qwen3NextForCausalLM(config), text_inputs()


def qwen2_vl(model="qwen2_vl", prefix="Qwen2VL", vision=None):
    modeling, configuration = classes(model)
    vision = vision or {
        "depth": 2, "embed_dim": 32, "num_heads": 2, "mlp_ratio": 1, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "hidden_size": 48,
    }  # fmt: skip
    text = SIZES | rotary([2, 2, 2])
    config = getattr(configuration, f"{prefix}Config")(
        text_config=text, vision_config=vision, **TOKENS
    )
    return getattr(modeling, f"{prefix}ForConditionalGeneration")(config), image_inputs()


def qwen2_5_vl():
    windows = {"window_size": 16, "fullatt_block_indexes": [1]}
    return qwen2_vl("qwen2_5_vl", "Qwen2_5_VL", VISION | windows)


def qwen3_vl(model="qwen3_vl", prefix="Qwen3VL", text=None):
    modeling, configuration = classes(model)
    text = text or SIZES | {"head_dim": 32} | rotary([6, 5, 5])
    vision = VISION | {"num_position_embeddings": 16}
    if prefix.startswith("Qwen3VL"):
        vision["deepstack_visual_indexes"] = [0]
    config = getattr(configuration, f"{prefix}Config")(
        text_config=text, vision_config=vision, **TOKENS
    )
    return getattr(modeling, f"{prefix}ForConditionalGeneration")(config), image_inputs()


def qwen3_vl_moe():
    text = SIZES | EXPERTS | {"head_dim": 32} | rotary([6, 5, 5])
    return qwen3_vl("qwen3_vl_moe", "Qwen3VLMoe", text)


def qwen3_5():
    text = SIZES | LINEAR | {"head_dim": 64} | rotary([3, 3, 2], partial=0.25)
    return qwen3_vl("qwen3_5", "Qwen3_5", text)


def qwen3_5_moe():
    text = SIZES | LINEAR | EXPERTS | {"head_dim": 64} | rotary([3, 3, 2], partial=0.25)
    return qwen3_vl("qwen3_5_moe", "Qwen3_5Moe", text)


MODELS = {
    make.__name__: make
    for make in (
        qwen2, qwen3, qwen3_moe, qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe, qwen3_next, qwen3_5,
        qwen3_5_moe,
    )
}  # fmt: skip


def built(name: str):
    """The model, with weights that make everything count, and its inputs."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model.eval(), inputs


def step(model, inputs: dict) -> dict:
    """Logits and every gradient, and how often which operator of npu-ops ran."""
    model.zero_grad()
    with Counter() as counter:
        logits = model(**inputs, use_cache=False).logits
    draw = torch.Generator().manual_seed(3)
    (logits * torch.randint(-64, 65, logits.shape, generator=draw) / 64).sum().backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach()} | found, by_op(counter.calls)


def by_op(calls: dict) -> dict:
    """Calls by the name of the operator."""
    return {name.split(".")[1]: count for name, count in calls.items()}


def assert_same(actual: dict, expected: dict) -> None:
    """Equal but for the order of fp32 additions, also that of sums over all tokens."""
    assert actual.keys() == expected.keys() and len(expected) > 10
    assert all(value.abs().max() > 0 for name, value in expected.items() if "bias" not in name)
    for name, value in actual.items():
        cancelling = name.endswith((".dt_bias", ".A_log"))  # sums over tokens of both signs
        tolerance = 1e-3 if cancelling else 5e-5
        assert_close(name, value, expected[name], Tolerance(tolerance, tolerance))


def compare(name: str, attention: str | None = None) -> dict:
    """Which operators ran, after a step without npu-ops and one with it gave the same."""
    npu_ops_adapters.revert()
    model, inputs = built(name)
    expected, calls = step(model, inputs)
    assert calls == {}, calls
    npu_ops_adapters.apply()
    try:
        model, inputs = built(name)  # in older versions layers take functions when they are built
        if attention:
            model.set_attn_implementation(attention)
        actual, calls = step(model, inputs)
    finally:
        npu_ops_adapters.revert()
    assert_same(actual, expected)
    return calls


def main(names) -> None:
    """Print ["NAME ATTENTION", calls or a traceback] for each; names are of `MODELS`."""
    npu_ops_import_hook.unwatch()
    for name in names:
        for attention in (None, "npu_ops"):
            try:
                result = compare(name, attention)
            except Exception:
                result = traceback.format_exc()
            print(json.dumps([f"{name} {attention}", result]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
