"""Write a picture and vLLM's processor for each vision model, in vLLM's environment.

python -m vllm_npu.pictures FOLDER

vLLM gets the picture as a PNG file. Its processor is that of its transformers: 4.57, which cannot
read the files of transformers 5, or 5.5. transformers gets the processor's output for the picture.
"""

from __future__ import annotations

import pathlib
import sys

import numpy
import torch
import transformers
from PIL import Image
from sglang_cpu.tiny import GRID, PICTURED, SPECIAL, TEXT
from tokenizers import Tokenizer, models, pre_tokenizers

PATCH = 16
SIZES = {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2}


def write(folder: pathlib.Path) -> None:
    """Write the processor's files, picture.png, and picture.pt with the tower's inputs."""
    folder.mkdir(parents=True)
    processor = transformers.Qwen3VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessorFast(**SIZES),
        video_processor=transformers.Qwen3VLVideoProcessor(**SIZES),
        tokenizer=tokenizer(folder / "tokenizer.json"),
        chat_template="{{ messages }}",
    )
    processor.save_pretrained(folder)
    shape = (GRID[1] * PATCH, GRID[2] * PATCH, 3)
    pixels = numpy.random.default_rng(0).integers(0, 256, shape, dtype=numpy.uint8)
    picture = Image.fromarray(pixels)
    picture.save(folder / "picture.png")
    seen = processor.image_processor(images=[picture], return_tensors="pt")
    assert seen["image_grid_thw"].tolist() == [GRID]
    torch.save(dict(seen), folder / "picture.pt")


def tokenizer(file: pathlib.Path):
    """Return a word tokenizer of the class that the processor needs."""
    names = {number: name for name, number in SPECIAL.items()}
    vocabulary = {names.get(i, f"t{i}"): i for i in range(TEXT["vocab_size"])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(file))
    return transformers.Qwen2TokenizerFast(
        tokenizer_file=str(file), unk_token="<unk>", pad_token="<unk>", eos_token="<|im_end|>",
        additional_special_tokens=list(SPECIAL)[:4],
    )  # fmt: skip


if __name__ == "__main__":
    for name in PICTURED:
        write(pathlib.Path(sys.argv[1]) / name)
