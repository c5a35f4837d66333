"""Write tiny models in slime's form, and rollouts in files that its trainer reads.

python slime_data.py FOLDER PROJECT DATA MODEL...

PROJECT: slime or relax; Relax uses slime's rollouts.
DATA: rollout, pictures, or pictures_even, whose sequences have even lengths, for two ranks.

With transformers 4, which Megatron-Bridge needs, models have no weights: Megatron draws them.
"""

from __future__ import annotations

import importlib
import pathlib
import random
import sys

import torch
import transformers
import verl_data
from PIL import Image

ROLLOUTS, PROMPTS, ANSWERS = 2, 2, 4


def write(folder: pathlib.Path, project: str, data: str, *models: str) -> None:
    """Write FOLDER/MODEL, and FOLDER/DATA_n.pt for --load-debug-rollout-data."""
    sees = data.startswith("pictures")
    if project == "relax":
        verl_data.VISION["deepstack_visual_indexes"] = []  # as in released Qwen3.5
    save = verl_data.save if transformers.__version__ >= "5" else save_without_weights
    for name in models:
        save(folder / name, name, verl_data.tokenizer())
    kind = importlib.import_module(f"{project}.utils.types").Sample
    draw = random.Random(0)
    for number in range(ROLLOUTS):
        samples = [sample(kind, draw, index) for index in range(PROMPTS * ANSWERS)]
        if sees:
            for one in samples:
                add_picture(one, draw)
        if data == "pictures_even":
            for one in samples:
                make_even(one)
        rollout = {"rollout_id": number, "samples": [x.to_dict() for x in samples]}
        torch.save(rollout, folder / f"{data}_{number}.pt")


def sample(kind: type, draw: random.Random, index: int):
    """Return a sample of random tokens; rewards differ within each group of answers."""
    prompt, answer = draw.randrange(6, 20), draw.randrange(5, 12)
    return kind(
        group_index=index // ANSWERS,
        index=index,
        tokens=[draw.randrange(8, 400) for _ in range(prompt + answer)],
        response_length=answer,
        reward=float(index % 3 == 0),
        loss_mask=[1] * answer,
        status=kind.Status.COMPLETED,
    )


def add_picture(sample, draw: random.Random) -> None:
    """Insert a picture after the first token, with the patches from transformers' processor."""
    vision, ids = verl_data.VISION, verl_data.TOKENS
    size = (32 + 16 * draw.randrange(3), 32)
    picture = Image.frombytes("RGB", size, draw.randbytes(3 * size[0] * size[1]))
    sample.multimodal_train_inputs = dict(processor()([picture], return_tensors="pt"))
    patches = int(sample.multimodal_train_inputs["image_grid_thw"].prod())
    merged = [ids["image_token_id"]] * (patches // vision["spatial_merge_size"] ** 2)
    sample.tokens[1:1] = [ids["vision_start_token_id"], *merged, ids["vision_end_token_id"]]


def make_even(sample) -> None:
    if len(sample.tokens) % 2:
        del sample.tokens[-sample.response_length - 1]


def processor():
    vision = verl_data.VISION
    sizes = {"patch_size": vision["patch_size"], "merge_size": vision["spatial_merge_size"]}
    if transformers.__version__ < "5":
        return transformers.Qwen2VLImageProcessor(**sizes, min_pixels=256, max_pixels=4096)
    edges = {"shortest_edge": 256, "longest_edge": 4096}
    return transformers.Qwen2VLImageProcessorPil(**sizes, size=edges)


def save_without_weights(folder: pathlib.Path, name: str, tokens) -> None:
    """Save a model for transformers 4, with its form of the rope settings and without weights."""
    family, text, vision = verl_data.MODELS[name]
    rope = dict(text["rope_parameters"])
    text = text | {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    kind = getattr(transformers, f"{family}Config")
    config = kind(text_config=text, vision_config=vision, **verl_data.TOKENS)
    config.architectures = [f"{family}ForConditionalGeneration"]
    config.save_pretrained(folder)
    processor().save_pretrained(folder)  # Relax recognises vision models by this file
    tokens.save_pretrained(folder)


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]), *sys.argv[2:])
