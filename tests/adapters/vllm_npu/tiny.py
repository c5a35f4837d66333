"""The tiny random models of sglang_cpu/tiny.py for vLLM, with the tokens transformers generates.

python -m vllm_npu.tiny FOLDER [MODEL...]

Writes FOLDER/MODEL with weights, configuration and `expected.json`, which has each prompt's tokens
and the greedily generated ones. A vision model needs the picture from `pictures`.
"""

from __future__ import annotations

import json
import pathlib
import sys

import torch
from sglang_cpu.tiny import IMAGE, MODELS, PICTURE, PICTURED, greedy
from sglang_cpu.tiny import PROMPTS as SHORT

# Three of four words of the last prompt occur before, so most words lead to a draft.
PROMPTS = SHORT | {"most words": [13 * i % 589 + 1 for i in range(450)]}


def write(name: str, folder: pathlib.Path) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().float().eval()
    model.save_pretrained(folder)
    expected = {prompt: [tokens, greedy(model, tokens)] for prompt, tokens in PROMPTS.items()}
    if name in PICTURED:
        types = torch.tensor([[int(token == IMAGE) for token in PICTURE]])
        picture = torch.load(folder / "picture.pt")
        following = greedy(model, PICTURE, mm_token_type_ids=types, **picture)
        expected["picture"] = [PICTURE, following]
        path = folder / "config.json"
        config = json.loads(path.read_text())
        text = config["text_config"]  # transformers 4.57 has another name for rope's base
        text["rope_theta"] = text["rope_parameters"]["rope_theta"]
        path.write_text(json.dumps(config))
    (folder / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[2:] or MODELS:
        write(name, pathlib.Path(sys.argv[1]) / name)
