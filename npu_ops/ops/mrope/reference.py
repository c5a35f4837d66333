"""Shared by mrope and qk_norm_rope: the reference of mrope, in plain PyTorch."""

from __future__ import annotations

import torch

from npu_ops.core import make
from npu_ops.ops.rope import reference as rope


def mrope(
    q, k, cos, sin, positions, mrope_section, section_layout, layout, pair_layout, inverse,
    rotary_dim,
):  # fmt: skip
    """Rotate q and k by angles of three axes T, H, W.

    cos, sin: [3, Bc, S, W], or [1, 1, rows, W] with positions [3, Bp, S].
    """
    axes = axis_of_frequency(mrope_section, section_layout, q.device)
    cos, sin = (merge(table, positions, axes, pair_layout) for table in (cos, sin))
    return tuple(rope.rotate(x, cos, sin, layout, pair_layout, inverse, rotary_dim) for x in (q, k))


def axis_of_frequency(mrope_section, section_layout, device="cpu"):
    """Return the axis of each frequency: 0, 1 or 2 for T, H, W.

    chunked (Qwen2-VL): T...TH...HW...W. interleaved (Qwen3-VL): THWTHW...T...T: H and W end after
    their number of frequencies, and T owns the rest.
    """
    t, h, w = mrope_section
    frequency = make.counted(t + h + w, device=device)
    if section_layout == "chunked":
        return (frequency >= t).long() + (frequency >= t + h).long()
    is_h = (frequency % 3 == 1) & (frequency < 3 * h)
    is_w = (frequency % 3 == 2) & (frequency < 3 * w)
    return is_h.long() + 2 * is_w.long()


def merge(table, positions, axes, pair_layout):
    """Merge [3, B, S, W] into [B, S, W]: take each column from the axis that owns its frequency."""
    if positions is not None:
        table = torch.stack([rope.gather(table[0], positions[axis]) for axis in range(3)])
    # full width: both elements of a pair have the same frequency
    if table.shape[-1] != axes.numel():
        axes = rope.join_pairs(axes, axes, pair_layout)
    # take_along_dim would make the number of tokens a constant of a compiled model
    return table.gather(0, axes.expand(1, *table.shape[1:]))[0]
