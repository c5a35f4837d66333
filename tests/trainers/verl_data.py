"""Writes tiny random models of real architectures, a tokenizer and data for verl to one folder."""

from __future__ import annotations

import io
import pathlib
import random

import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

LINES = (
    "the quick brown fox jumps over the lazy dog",
    "user assistant system think what is two plus three? it is five.",
    "0 1 2 3 4 5 6 7 8 9 10 11 12",
)
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
TEMPLATE = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.content is string %}{{- m.content }}{%- else %}{%- for c in m.content %}"
    "{%- if c.type == 'image' or 'image' in c %}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif 'text' in c %}{{- c.text }}{%- endif %}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>' + '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
TEXT = dict(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
    tie_word_embeddings=False, pad_token_id=0, eos_token_id=2, bos_token_id=None,
)  # fmt: skip
# As many tokens as the tokenizer has: vLLM in verl gives other tokens no probability, but verl's
# actor does.
SERVED = dict(vocab_size=348, initializer_range=0.1)
EXPERTS = dict(  # all sizes differ: transformers infers from them how saved weights are transposed
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, decoder_sparse_step=1
)
SHARED_EXPERT = dict(shared_expert_intermediate_size=64)
DELTA_NET = dict(  # 3 layers of Gated Delta Net per layer of attention
    num_hidden_layers=4, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=32,
    linear_value_head_dim=32, linear_conv_kernel_dim=4, full_attention_interval=4,
    layer_types=[*["linear_attention"] * 3, "full_attention"],  # released models have it too
)  # fmt: skip
VISION = dict(
    depth=2, hidden_size=32, intermediate_size=64, num_heads=2, in_channels=3, patch_size=8,
    spatial_merge_size=2, temporal_patch_size=2, out_hidden_size=64, num_position_embeddings=64,
)  # fmt: skip
DEEPSTACK = dict(depth=3, deepstack_visual_indexes=[0, 1])
TOKENS = dict(
    image_token_id=6, video_token_id=7, vision_start_token_id=3, vision_end_token_id=4,
    tie_word_embeddings=False,
)  # fmt: skip


def rope(section, **changes) -> dict:
    parameters = {"mrope_section": section, "mrope_interleaved": True, "rope_theta": 10000.0}
    return {"rope_parameters": {"rope_type": "default", **parameters, **changes}}


PARTIAL = rope([4, 2, 2], partial_rotary_factor=0.5)
# The prefix of a model's class names, and the settings of its text model and vision tower.
MODELS = {
    "qwen3": ("Qwen3", TEXT, None),
    "qwen3_served": ("Qwen3", TEXT | SERVED, None),
    "qwen3_moe": ("Qwen3Moe", TEXT | EXPERTS | dict(norm_topk_prob=True), None),  # as released
    "qwen3_next": ("Qwen3Next", TEXT | DELTA_NET | EXPERTS | SHARED_EXPERT, None),
    "qwen3_next_served": (
        "Qwen3Next",
        TEXT | DELTA_NET | EXPERTS | SHARED_EXPERT | SERVED,
        None,
    ),
    "qwen3_5": ("Qwen3_5", TEXT | DELTA_NET | PARTIAL, VISION),
    "qwen3_5_moe": ("Qwen3_5Moe", TEXT | DELTA_NET | EXPERTS | SHARED_EXPERT | PARTIAL, VISION),
    "qwen3_vl": ("Qwen3VL", TEXT | rope([8, 4, 4]), VISION | DEEPSTACK),
    "qwen3_vl_3": (  # Megatron needs more layers than deepstack uses
        "Qwen3VL",
        TEXT | rope([8, 4, 4]) | dict(num_hidden_layers=3),
        VISION | DEEPSTACK,
    ),
    "qwen3_vl_moe": ("Qwen3VLMoe", TEXT | EXPERTS | rope([8, 4, 4]), VISION | DEEPSTACK),
}
SEES = tuple(name for name, (_, _, vision) in MODELS.items() if vision)


def write(folder: pathlib.Path, names) -> None:
    """Write the models to folders of their names, and SFT data and prompts: text and pictures."""
    import pandas  # installed for verl, not for the tests themselves

    tokens = tokenizer()
    for name in names:
        save(folder / name, name, tokens)
    random.seed(0)
    for kind, rows in {"text": list(text()), "pictures": list(pictures())}.items():
        pandas.DataFrame(rows).to_parquet(folder / f"{kind}.parquet")
        prompts = pandas.DataFrame(map(prompt, rows))
        prompts.to_parquet(folder / f"{kind}_prompts.parquet")


def save(folder: pathlib.Path, name: str, tokens) -> None:
    torch.manual_seed(0)
    family, text_config, vision = MODELS[name]
    if vision is None:
        config = getattr(transformers, f"{family}Config")(**text_config)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    else:
        config = getattr(transformers, f"{family}Config")(
            text_config=text_config, vision_config=vision, **TOKENS
        )
        model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
        processor(tokens).save_pretrained(folder)
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)


def tokenizer():
    bytes_of = Tokenizer(models.BPE())
    bytes_of.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_of.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    bytes_of.train_from_iterator(LINES, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bytes_of, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
    )  # fmt: skip


def processor(tokens):
    sizes = {"patch_size": 8, "temporal_patch_size": 2, "merge_size": 2}
    edges = {"shortest_edge": 256, "longest_edge": 4096}
    images = transformers.Qwen2VLImageProcessorPil(**sizes, size=edges)
    videos = transformers.Qwen3VLVideoProcessor(**sizes)
    return transformers.Qwen3VLProcessor(
        image_processor=images, tokenizer=tokens, video_processor=videos, chat_template=TEMPLATE
    )


def conversation(question: str, answer: str) -> list[dict]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def prompt(row: dict) -> dict:
    """Return a row for verl's RL trainers: the question, and the arguments of the reward."""
    question, answer = row["messages"]
    rule = {"style": "rule", "ground_truth": answer["content"]}
    pictures = {"images": row["images"]} if "images" in row else {}
    return {"prompt": [question], "data_source": "test", "reward_model": rule, **pictures}


def text():
    for i in range(16):
        a, b = random.randrange(10), random.randrange(10)
        question = f"what is {a} plus {b}?" + " the quick brown fox" * (i % 4)
        answer = f"it is {a + b}." + " the lazy dog" * (i % 3)
        yield {"messages": conversation(question, answer)}


def pictures():
    for i in range(16):
        colour = (i * 10 % 255, i * 37 % 255, i * 91 % 255)
        picture = io.BytesIO()
        Image.new("RGB", (32 + 16 * (i % 3), 32), colour).save(picture, "PNG")
        answer = f"it is {i}." + " the lazy dog" * (i % 3)
        messages = conversation("<image>what is this?", answer)
        yield {"messages": messages, "images": [{"bytes": picture.getvalue()}]}
