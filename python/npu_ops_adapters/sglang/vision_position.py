"""Position embedding of Qwen3-VL's vision tower: a square table, interpolated to a grid."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from npu_ops_adapters.patching import Patch
from npu_ops_adapters.sglang import functions

_MODULE = "sglang.srt.models.qwen3_vl"
_WHY = "in fp32 a grid point falls beside the table's row that it is on, and weights are rounded"


def patches() -> Iterable[Patch]:
    """Patch the methods that compute it; their names depend on the version.

    They are patched when the model is imported: the registry would import it in every process.
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
    """Compute it unless align_corners is False, which SGLang uses when it captures a graph."""
    if not getattr(self, "align_corners", True):
        raise functions.NotOursError("SGLang wants the grid to end half a patch before the corners")
    return ours(self, grid_thw)


def ours(self, grid_thw) -> torch.Tensor:
    """Return the position embedding of images.

    grid_thw: `[images, 3]`, patches in time, height and width, as a list or a tensor. Patch
    positions are computed in fp64 on the host. The weighted sum is fp32, rounded once. An image's
    patches are ordered in blocks of `spatial_merge_size` squared.
    """
    table, side, merge = self.pos_embed, self.num_grid_per_side, self.spatial_merge_size
    functions.check_device(table.weight)
    grids = [[int(n) for n in grid] for grid in grid_thw]
    places = [_corners(height, width, side, merge, frames) for frames, height, width in grids]
    rows = torch.cat([rows for rows, _ in places], dim=1).to(table.weight.device)
    weights = torch.cat([weights for _, weights in places], dim=1).float().to(rows.device)
    embedded = (table(rows).float() * weights[..., None]).sum(dim=0)
    return embedded.to(table.weight.dtype)


def _corners(height, width, side, merge, frames):
    """Return the four table rows around each patch, `[4, patches]`, and their weights in fp64."""
    vertical, horizontal = (_between(n, side) for n in (height, width))
    rows, weights = [], []
    for row, up in vertical:
        for column, left in horizontal:
            rows.append(row[:, None] * side + column)
            weights.append(up[:, None] * left)
    return tuple(
        torch.stack(x)
        .view(4, height // merge, merge, width // merge, merge)
        .transpose(2, 3)
        .reshape(4, -1)
        .repeat(1, frames)
        for x in (rows, weights)
    )


def _between(count, side):
    """For `count` points evenly spread over a side, return the index before and after, with
    weights."""
    points = torch.linspace(0, side - 1, count, dtype=torch.float64, device="cpu")
    before = points.long()
    share = points - before
    return (before, 1 - share), ((before + 1).clamp(max=side - 1), share)
