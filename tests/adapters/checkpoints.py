"""Checkpoints of tiny models in another dtype."""

from __future__ import annotations

import pathlib
import shutil

import torch
from safetensors.torch import load_file, save_file


def in_dtype(model: pathlib.Path, dtype: str, into: pathlib.Path) -> pathlib.Path:
    """A copy in the dtype that is trained: a server may keep A_log in fp32."""
    shutil.copytree(model, into / model.name)
    file = into / model.name / "model.safetensors"
    weights = {n: x.to(getattr(torch, dtype)) for n, x in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    return into / model.name
