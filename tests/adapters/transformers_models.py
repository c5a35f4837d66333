"""Build tiny random models of transformers 4.57 and 5; run each without and with npu-ops.

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
    """Return the rope settings in the form of this version."""
    parameters = {"rope_type": "default"}
    if section:
        parameters |= {"mrope_section": section, "mrope_interleaved": True}
    if is_version_4():
        scaling = {"rope_scaling": parameters} if section else {}
        return scaling | {"rope_theta": 1e4, "partial_rotary_factor": partial}
    parameters |= {"rope_theta": 1e4, "partial_rotary_factor": partial}
    return {"rope_parameters": parameters}


def classes(model: str):
    """Return the modeling and the configuration module of a model."""
    home = f"transformers.models.{model}"
    return (
        importlib.import_module(f"{home}.{kind}_{model}") for kind in ("modeling", "configuration")
    )


def text_inputs(batch=2, length=70) -> dict:
    draw = torch.Generator().manual_seed(1)
    return {"input_ids": torch.randint(59, (batch, length), generator=draw)}


def image_inputs() -> dict:
    """Return text inputs with two images of different sizes in each sequence."""
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


# Models that npu-ops recognises by their code


def qwen4_exp(gate="sigmoid", **more):
    """Build Qwen4-Exp: attention to the best 4 blocks of 2 keys, hyper-connections of 2 streams."""
    modeling, configuration = classes("qwen4_exp")
    indexer = {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    }  # fmt: skip
    text = SIZES | EXPERTS | LINEAR | {"head_dim": 32, "hc_count": 2, "hc_lowrank": 8} | indexer
    text |= {"layer_types": ["linear_attention", "indexed_attention"], "output_gate_type": gate}
    text |= rotary([2, 1, 1], partial=0.25) | more
    config = configuration.Qwen4ExpTextConfig(**text)
    return modeling.Qwen4ExpForCausalLM(config), text_inputs(length=24)


def qwen4_exp_silu():
    """Build Qwen4-Exp with a silu gate, and n-gram features of tokens in its first layer."""
    ngrams = {"heads_per_ngram": 2, "ngram_vocab_size_base": 20, "eos_token_id": 63}
    return qwen4_exp("silu", ple_layer_ids=[1], **ngrams)


def qwen4_exp_images():
    """Build Qwen4-Exp with a vision tower."""
    modeling, configuration = classes("qwen4_exp")
    text = qwen4_exp()[0].config.to_dict()
    vision = VISION | {"num_position_embeddings": 16}
    config = configuration.Qwen4ExpConfig(text_config=text, vision_config=vision, **TOKENS)
    return modeling.Qwen4ExpForConditionalGeneration(config), image_inputs()


def olmo_hybrid():
    """Build OLMo Hybrid, with beta up to 2 and filters of three taps."""
    modeling, configuration = classes("olmo_hybrid")
    more = {"linear_conv_kernel_dim": 3, "pad_token_id": 0, "eos_token_id": 63}
    config = configuration.OlmoHybridConfig(**SIZES, **LINEAR, **rotary(), **more)
    return modeling.OlmoHybridForCausalLM(config), text_inputs()


# Kimi Delta Attention: a decay per key channel.
CHANNELS = {
    "layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"],
    "kv_lora_rank": 16, "v_head_dim": 24, "qk_nope_head_dim": 16, "moe_intermediate_size": 16,
    "num_key_value_heads": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "pad_token_id": 0,
}  # fmt: skip


def kimi_linear():
    modeling, configuration = classes("kimi_linear")
    heads = {"linear_head_dim": 16, "linear_num_heads": 4, "qk_rope_head_dim": 8}
    config = configuration.KimiLinearConfig(**SIZES | CHANNELS | heads, num_local_experts=4)
    return modeling.KimiLinearForCausalLM(config), text_inputs()


def bailing_hybrid():
    modeling, configuration = classes("bailing_hybrid")
    heads = {"head_dim": 16, "qk_rope_head_dim": 8, "q_lora_rank": 24}
    config = configuration.BailingHybridConfig(**SIZES | CHANNELS | heads, num_local_experts=4)
    return modeling.BailingHybridForCausalLM(config), text_inputs()


def glm5_next():
    modeling, configuration = classes("glm5_next")
    heads = {"linear_head_dim": 16, "linear_num_heads": 4, "q_lora_rank": 24, "index_topk": 8}
    heads |= {"index_head_dim": 16, "index_n_heads": 2, "index_kpool": 2, "hc_mult": 2}
    text = SIZES | CHANNELS | heads | {"n_routed_experts": 4}
    text["layer_types"] = ["linear_attention", "indexed_attention"]
    vision = {
        "depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 24, "patch_size": 4,
        "image_size": 32, "out_hidden_size": 48, "projection_intermediate_size": 24,
    }  # fmt: skip
    config = configuration.Glm5NextConfig(
        text_config=text, vision_config=vision, image_token_id=60, video_token_id=61
    )
    inputs = image_inputs()
    inputs.pop("mm_token_type_ids")
    return modeling.Glm5NextForConditionalGeneration(config), inputs


BY_DEFINITION = {
    make.__name__: make
    for make in (
        qwen4_exp, qwen4_exp_silu, qwen4_exp_images, olmo_hybrid, kimi_linear, bailing_hybrid,
        glm5_next,
    )
}  # fmt: skip


def built(name: str):
    """Return the model, with weights that make all parts significant, and its inputs."""
    torch.manual_seed(0)
    model, inputs = (MODELS | BY_DEFINITION)[name]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".A_log"):
                parameter.clamp_(max=0)  # with a large decay the state has no gradient
            elif parameter.dim() > 1:
                parameter.mul_(4) if parameter.any() else parameter.normal_(std=0.3)
    return model.eval(), inputs


def step(model, inputs: dict) -> dict:
    """Return logits and all gradients by name, and the calls of npu-ops's operators."""
    model.zero_grad()
    with Counter() as counter:
        logits = model(**inputs, use_cache=False).logits
    draw = torch.Generator().manual_seed(3)
    (logits * torch.randint(-64, 65, logits.shape, generator=draw) / 64).sum().backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach()} | found, by_op(counter.calls)


def by_op(calls: dict) -> dict:
    """Return the calls by the operators' short names."""
    return {name.split(".")[1]: count for name, count in calls.items()}


def assert_same(actual: dict, expected: dict) -> None:
    """Check that results are equal up to the order of fp32 additions, also in sums over tokens."""
    assert actual.keys() == expected.keys() and len(expected) > 10
    assert all(value.abs().max() > 0 for name, value in expected.items() if "bias" not in name)
    for name, value in actual.items():
        cancelling = name.endswith((".dt_bias", ".A_log"))  # sums of both signs over tokens
        tolerance = 1e-3 if cancelling else 5e-5
        assert_close(name, value, expected[name], Tolerance(tolerance, tolerance))


def compare(name: str, attention: str | None = None) -> dict:
    """Check that a step gives the same without and with npu-ops; return the operators' calls."""
    npu_ops_adapters.revert()
    model, inputs = built(name)
    expected, calls = step(model, inputs)
    assert calls == {}, calls
    npu_ops_adapters.apply()
    try:
        model, inputs = built(name)  # in older versions layers bind functions when they are built
        if attention:
            model.set_attn_implementation(attention)
        actual, calls = step(model, inputs)
    finally:
        npu_ops_adapters.revert()
    assert_same(actual, expected)
    return calls


def generate(model, inputs: dict):
    """Generate six tokens per prompt; return them with their logits, and the operators' calls."""
    with torch.no_grad(), Counter() as counter:
        found = model.generate(
            **inputs, max_new_tokens=6, do_sample=False, output_logits=True,
            return_dict_in_generate=True, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
    return found, by_op(counter.calls)


def compare_generation(name: str, padded: bool) -> dict:
    """Check that npu-ops leaves generation unchanged; return the operators' calls."""
    npu_ops_adapters.revert()
    model, inputs = built(name)
    if padded:
        mask = torch.ones_like(inputs["input_ids"])
        mask[0, :2] = 0
        inputs["attention_mask"] = mask
    expected, calls = generate(model, inputs)
    assert calls == {}, calls
    npu_ops_adapters.apply()
    try:
        actual, calls = generate(model, inputs)
    finally:
        npu_ops_adapters.revert()
    assert actual.sequences.equal(expected.sequences) and len(actual.logits) == 6
    for ours, theirs in zip(actual.logits, expected.logits, strict=True):
        assert_close("logits", ours, theirs, Tolerance(2e-5, 2e-5))
    return calls


def compare_packed(name: str):
    """Check that packed sequences have the logits they have alone; return the model, and a call."""
    model, _ = built(name)
    model.set_attn_implementation("npu_ops")
    ids = text_inputs(1, 60)["input_ids"]
    lengths = [20, 1, 39]
    starts = torch.tensor([0, 20, 21, 60], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packing = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}

    def call():
        return model(ids, position_ids=positions, use_cache=False, **packing).logits

    alone = [model(part, use_cache=False).logits for part in ids.split(lengths, 1)]
    assert_close("logits", call(), torch.cat(alone, 1), Tolerance(2e-5, 2e-5))
    return model, call


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
