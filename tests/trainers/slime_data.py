"""Tiny models as slime takes it, and rollouts in the files that its trainer reads.

python slime_data.py FOLDER PROJECT MODEL...

PROJECT: slime, or Relax, whose rollouts are slime's, in lower case.
"""

from __future__ import annotations

import importlib
import pathlib
import random
import sys

import torch
import verl_data

ROLLOUTS, PROMPTS, ANSWERS = 2, 2, 4


def write(folder: pathlib.Path, project: str, *models: str) -> None:
    """FOLDER/MODEL, and FOLDER/rollout_0.pt, as --load-debug-rollout-data names them."""
    for name in models:
        verl_data.save(folder / name, name, verl_data.tokenizer())
    kind = importlib.import_module(f"{project}.utils.types").Sample
    draw = random.Random(0)
    for number in range(ROLLOUTS):
        samples = [sample(kind, draw, index) for index in range(PROMPTS * ANSWERS)]
        rollout = {"rollout_id": number, "samples": [x.to_dict() for x in samples]}
        torch.save(rollout, folder / f"rollout_{number}.pt")


def sample(kind: type, draw: random.Random, index: int):
    """Tokens as they fall; rewards that differ within each group of answers."""
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


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]), *sys.argv[2:])
