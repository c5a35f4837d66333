"""Shared by sglang, transformers, vllm: positions in the vision tower of Qwen3-VL and Qwen3.5.

Each framework rounds the position embedding at different places, and servers round the table of
angles to the tower's dtype. The functions here round each number once.
"""

from __future__ import annotations

import torch


def position_embedding(tower, grid_thw) -> torch.Tensor:
    """Return the position embedding of images, `[T, D]`: a square table, interpolated to each grid.

    tower: a vision model of SGLang, vLLM or transformers 4.
    grid_thw: `[images, 3]`, patches in time, height and width, as a list or a tensor.
    """
    table = tower.pos_embed
    rows, weights = corners(grid_thw, tower.num_grid_per_side, tower.spatial_merge_size)
    rows, weights = rows.to(table.weight.device), weights.to(table.weight.device)
    return (table(rows).float() * weights[..., None]).sum(dim=0).to(table.weight.dtype)


def corners(grid_thw, side: int, merge: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the four table rows around each patch, int64 `[4, T]`, and their weights, fp32.

    Positions are computed in fp64 on the host: in fp32, rounding would move patches that lie
    exactly on a row of the table. An image's patches are ordered in blocks of merge x merge.
    """
    grids = ([int(n) for n in grid] for grid in grid_thw)
    images = [_corners(height, width, side, merge, frames) for frames, height, width in grids]
    rows, weights = (torch.cat(parts, dim=1) for parts in zip(*images, strict=True))
    return rows, weights.float()


def _corners(height, width, side, merge, frames):
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
    """Spread `count` points evenly over a side; return indices before and after, with weights."""
    points = torch.linspace(0, side - 1, count, dtype=torch.float64, device="cpu")
    before = points.long()
    share = points - before
    return (before, 1 - share), ((before + 1).clamp(max=side - 1), share)


def angles(tower, grid_thw) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fp32 cosines and sines `[T, D / 2]` of the grids' patches, as transformers does.

    tower: SGLang's or vLLM's vision model.
    """
    rotary, merge = tower.rotary_pos_emb, tower.spatial_merge_size
    places = [tower.rot_pos_ids(h, w, merge).repeat(t, 1) for t, h, w in grid_thw]
    places = torch.cat(places).to(tower.device).float()
    pairs = torch.arange(0, rotary.rotary_dim, 2, dtype=torch.float32, device=tower.device)
    frequencies = 1.0 / rotary.base ** (pairs / rotary.rotary_dim)
    found = places[..., None] * frequencies
    return found.cos().flatten(1), found.sin().flatten(1)
