"""The tiny random models of sglang_cpu/tiny.py for vLLM, and what transformers generates with them.

python -m vllm_npu.tiny FOLDER [MODEL...]

Writes FOLDER/MODEL with weights, configuration and `expected.json`: for each prompt its tokens and
those that follow greedily. A model that sees needs the picture of `pictures`.
"""

from __future__ import annotations

import json
import pathlib
import sys

import torch
from sglang_cpu.tiny import IMAGE, MODELS, PICTURE, PICTURED, greedy
from sglang_cpu.tiny import PROMPTS as SHORT

# In the last prompt, three of four words occur before, so that a draft is found after most words.
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
        text = config["text_config"]  # transformers 4.57 has the base under another name
        text["rope_theta"] = text["rope_parameters"]["rope_theta"]
        path.write_text(json.dumps(config))
    (folder / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[2:] or MODELS:
        write(name, pathlib.Path(sys.argv[1]) / name)
