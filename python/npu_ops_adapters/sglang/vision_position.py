"""Replaces Qwen3-VL's position embedding of images: a square table, interpolated to a grid."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from npu_ops_adapters import vision_tower
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.sglang import functions

_MODULE = "sglang.srt.models.qwen3_vl"
_WHY = "fp32 moves a grid point off its row of the table, and weights are rounded"


def patches() -> Iterable[Patch]:
    """Patch the methods that compute the position embedding; their names depend on the version.

    npu-ops itself applies these patches when the model's module is imported. SGLang's hook registry
    would import that module in every process.
    """
    names = ["fast_pos_embed_interpolate"]
    names += ["fast_pos_embed_interpolate_from_list"] if functions.since("0.5.11") else []
    names += ["fast_pos_embed_interpolate_vectorized"] if functions.since("0.5.15") else []
    for name in names:
        yield functions.replaced(
            f"{_MODULE}:Qwen3VLMoeVisionModel.{name}",
            "vision_position",
            ours_if_asked if name == names[0] else ours,
            _WHY,
            ("self", "grid_thw"),
            by="",
        )


def ours_if_asked(self, grid_thw) -> torch.Tensor:
    """Return the position embedding of images, `[T, D]`, unless align_corners is False.

    SGLang sets align_corners to False when it captures a graph.
    """
    if not getattr(self, "align_corners", True):
        raise functions.NotOursError("SGLang wants the grid to end half a patch before the corners")
    return ours(self, grid_thw)


def ours(self, grid_thw) -> torch.Tensor:
    """Return the position embedding of images, `[T, D]`."""
    functions.check_device(self.pos_embed.weight)
    return vision_tower.position_embedding(self, grid_thw)
