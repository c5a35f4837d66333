"""Make tiny random models, and the tokens that transformers generates with them.

python -m sglang_cpu.tiny FOLDER [MODEL...]

Writes FOLDER/MODEL with weights, configuration and `expected.json`, which has each prompt's tokens
and the greedily generated ones.
"""

import json
import pathlib
import sys

import torch
import transformers

TEXT = {
    "vocab_size": 600,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
SPECIAL = {"<|image_pad|>": 590, "<|video_pad|>": 591, "<|vision_start|>": 592,
           "<|vision_end|>": 593, "<|im_end|>": 599, "<unk>": 0}  # fmt: skip
IMAGE = SPECIAL["<|image_pad|>"]
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": SPECIAL["<|video_pad|>"],
    "vision_start_token_id": SPECIAL["<|vision_start|>"],
    "vision_end_token_id": SPECIAL["<|vision_end|>"],
}
TOWER = {
    "depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4,
    "out_hidden_size": 128, "patch_size": 16, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "num_position_embeddings": 64,
}  # fmt: skip
GRID = [1, 4, 6]  # frames, height and width of one image in patches; 2 x 2 merge into a token
FOLLOWING = 8


def qwen3():
    config = transformers.Qwen3Config(**TEXT, head_dim=64, num_hidden_layers=2)
    return transformers.Qwen3ForCausalLM(config)


def qwen3next():
    """Return a model with three layers of Gated Delta Net, one of attention, and experts.

    It has 32 value heads, in groups. On CPUs PyTorch's exp rounds elements after the last two full
    vectors (32 elements with AVX-512) differently, see docs/invariance.md.
    """
    config = transformers.Qwen3NextConfig(
        **TEXT, head_dim=64, num_hidden_layers=4, linear_num_key_heads=8,
        linear_num_value_heads=32, linear_key_head_dim=32, linear_value_head_dim=32,
        linear_conv_kernel_dim=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
        shared_expert_intermediate_size=64, decoder_sparse_step=1,
    )  # fmt: skip
    return transformers.Qwen3NextForCausalLM(config)


def qwen3vl():
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True,
            "mrope_section": [6, 5, 5]}  # fmt: skip
    config = transformers.Qwen3VLConfig(
        text_config=TEXT | {"head_dim": 32, "num_hidden_layers": 3, "rope_parameters": rope},
        vision_config=TOWER | {"deepstack_visual_indexes": [0, 1]},
        **TOKENS,
        tie_word_embeddings=False,
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


def qwen3_5(config="Qwen3_5Config", **experts):
    """Return a model with three layers of Gated Delta Net, one of attention, and a vision tower.

    config: a configuration class of transformers; the version that vLLM 0.18.0 pins has no Qwen3.5.
    """
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True,
            "mrope_section": [4, 2, 2], "partial_rotary_factor": 0.25}  # fmt: skip
    text = {
        "head_dim": 64, "num_hidden_layers": 4, "rope_parameters": rope,
        "partial_rotary_factor": 0.25, "linear_num_key_heads": 8, "linear_num_value_heads": 32,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    made = getattr(transformers, config)(
        text_config=TEXT | text | experts, vision_config=TOWER, **TOKENS, tie_word_embeddings=False
    )
    return transformers.AutoModelForImageTextToText.from_config(made)


def qwen3_5moe():
    return qwen3_5(
        "Qwen3_5MoeConfig", num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=64, shared_expert_intermediate_size=64,
    )  # fmt: skip


def qwen4exp(gate="sigmoid"):
    """Return a model with two layers of Gated Delta Net, two of sparse attention, and a tower.

    SGLang selects 512 or 2048 blocks of keys per query, so only prompts of more than 1025 tokens
    leave any out. The second sparse layer reads tables that the first might have changed.
    """
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True,
            "mrope_section": [4, 2, 2], "partial_rotary_factor": 0.25}  # fmt: skip
    text = {
        "head_dim": 64, "num_hidden_layers": 4, "rope_parameters": rope,
        "linear_num_key_heads": 2, "linear_num_value_heads": 32, "linear_key_head_dim": 32,
        "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "output_gate_type": gate,
        "layer_types": ["linear_attention", "indexed_attention"] * 2, "hc_count": 2,
        "hc_lowrank": 16, "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 32,
        "indexer_budget": 1024, "indexer_compress_ratio": 2, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64, "max_position_embeddings": 2048,
        "eos_token_id": SPECIAL["<|im_end|>"],
    }  # fmt: skip
    config = transformers.Qwen4ExpConfig(
        text_config=TEXT | text, vision_config=TOWER, **TOKENS, tie_word_embeddings=False
    )
    return transformers.Qwen4ExpForConditionalGeneration(config)


MODELS = {"qwen3": qwen3, "qwen3next": qwen3next, "qwen3vl": qwen3vl, "qwen3_5": qwen3_5,
          "qwen3_5moe": qwen3_5moe, "qwen4exp": qwen4exp}  # fmt: skip
PROMPTS = {"short": [1, 2, 3, 4, 5, 6, 7], "three chunks": [7 * i % 580 + 1 for i in range(150)]}
CHOSEN = {"a choice of keys": [11 * i % 580 + 1 for i in range(1060)]}
PICTURED = ("qwen3vl", "qwen3_5", "qwen3_5moe", "qwen4exp")
# every n-th layer is attention
INTERVALS = {"qwen3next": 4, "qwen3_5": 4, "qwen3_5moe": 4, "qwen4exp": 2}
HYBRID = tuple(INTERVALS)
SEEDS = {"qwen4exp": 5}  # with other seeds a token's two largest logits are equal in bf16
BFLOAT16 = ("qwen4exp",)  # SGLang has some of their weights only in this dtype
PICTURE = [1, 2, 592, *[IMAGE] * 6, 593, 3, 4, 5]


def write(name: str, folder: pathlib.Path) -> None:
    """Write the files that SGLang needs to serve the model, and the expected tokens."""
    torch.manual_seed(SEEDS.get(name, 0))
    model = MODELS[name]().to(torch.bfloat16 if name in BFLOAT16 else torch.float32).eval()
    model.save_pretrained(folder)
    prompts = PROMPTS | (CHOSEN if name == "qwen4exp" else {})
    expected = {prompt: [tokens, greedy(model, tokens)] for prompt, tokens in prompts.items()}
    if name in HYBRID:  # SGLang reads these; transformers does not write them
        path = folder / "config.json"
        config = json.loads(path.read_text())
        config.get("text_config", config)["full_attention_interval"] = INTERVALS[name]
        config.get("vision_config", {})["deepstack_visual_indexes"] = []
        path.write_text(json.dumps(config))
    if name in PICTURED:
        picture = {"pixel_values": torch.randn(GRID[1] * GRID[2], 3 * 2 * 16 * 16),
                   "image_grid_thw": torch.tensor([GRID])}  # fmt: skip
        types = torch.tensor([[int(token == IMAGE) for token in PICTURE]])
        following = greedy(model, PICTURE, mm_token_type_ids=types, **picture)
        expected["picture"] = [PICTURE, following]
        torch.save(picture, folder / "picture.pt")
        write_processor(folder)
    (folder / "expected.json").write_text(json.dumps(expected))


def greedy(model, tokens, **inputs):
    ids = torch.tensor([tokens])
    out = model.generate(
        ids, max_new_tokens=FOLLOWING, do_sample=False, eos_token_id=None, **inputs
    )
    return out[0, len(tokens) :].tolist()


def write_processor(folder: pathlib.Path) -> None:
    """Write a processor, which SGLang loads for a multimodal model even if prompts are tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = {number: name for name, number in SPECIAL.items()}
    vocabulary = {names.get(i, f"t{i}"): i for i in range(TEXT["vocab_size"])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<unk>", eos_token="<|im_end|>",
        additional_special_tokens=list(SPECIAL)[:4],
    )  # fmt: skip
    sizes = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
    transformers.Qwen3VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(**sizes),
        video_processor=transformers.Qwen3VLVideoProcessor(**sizes),
        tokenizer=tokenizer,
        chat_template="{{ messages }}",
    ).save_pretrained(folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[2:] or MODELS:
        write(name, pathlib.Path(sys.argv[1]) / name)
