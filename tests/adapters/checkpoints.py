"""Copy a tiny model's checkpoint in another dtype."""

from __future__ import annotations

import pathlib
import shutil

import torch
from safetensors.torch import load_file, save_file


def in_dtype(
    model: pathlib.Path, dtype: str, into: pathlib.Path, trained: bool = False
) -> pathlib.Path:
    """Copy a model with all weights in the trainer's dtype: a server may keep A_log in fp32.

    trained: add noise to the norms' weights, which transformers initializes to 0 or 1.
    """
    shutil.copytree(model, into / model.name)
    file = into / model.name / "model.safetensors"
    weights = {n: x.to(getattr(torch, dtype)) for n, x in load_file(file).items()}
    for name, x in weights.items():
        if trained and name.endswith("norm.weight"):
            x += (torch.randn(x.shape, generator=torch.Generator().manual_seed(0)) / 8).to(x)
    save_file(weights, file, metadata={"format": "pt"})
    return into / model.name
