"""Shared by rope, mrope and qk_norm_rope: the reference of rotary embedding, in plain PyTorch."""

from __future__ import annotations

import torch

from npu_ops.core import make
from npu_ops.ops.rope.packing import NOBODY


def rope(q, k, cos, sin, positions, layout, pair_layout, inverse, rotary_dim):
    """Rotate q and k; see `rotate`. cos, sin: [Bc, rows, W]; positions: None or [Bp, S] rows.

    A row outside the table gives NaN. NOBODY, the row of a token after the last sequence, gives 0.
    """
    if positions is None:
        return tuple(rotate(x, cos, sin, layout, pair_layout, inverse, rotary_dim) for x in (q, k))
    rows, nobodys = cos.shape[1], positions == NOBODY
    there = (positions >= 0) & (positions < rows)
    if not rows:
        cos, sin = (t.new_zeros((t.shape[0], 1, t.shape[2])) for t in (cos, sin))
    inside = positions.clamp(0, max(rows, 1) - 1)
    cos, sin = (gather(t, inside).where(there[..., None], torch.nan) for t in (cos, sin))
    rotated = (rotate(x, cos, sin, layout, pair_layout, inverse, rotary_dim) for x in (q, k))
    return tuple(x.masked_fill(over_heads(nobodys[..., None], layout), 0) for x in rotated)


def gather(table, positions):
    """Return the table's row of each token: [Bc, rows, W] -> [B, S, W]."""
    if positions is None:
        return table
    batch = make.counted(table.shape[0], device=table.device)[:, None]
    return table[batch, positions.long()]


def rotate(x, cos, sin, layout, pair_layout, inverse, rotary_dim):
    """Rotate each pair of the first `rotary_dim` elements of each head by its token's angle.

    cos, sin: [B or 1, S, W], where W is the rotary dimension or half of it. The result is computed
    in fp32 (fp64 for fp64 x) and rounded once. The inverse is computed as the transpose.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    (cos1, cos2), (sin1, sin2) = (
        halves(table.to(wide), pair_layout, rotary_dim, layout) for table in (cos, sin)
    )
    x1, x2 = split_pairs(x[..., :rotary_dim].to(wide), pair_layout)
    if inverse:
        out1, out2 = x1 * cos1 + x2 * sin2, x2 * cos2 - x1 * sin1
    else:
        out1, out2 = x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2
    rotated = join_pairs(out1, out2, pair_layout).to(x.dtype)
    return torch.cat((rotated, x[..., rotary_dim:]), dim=-1)


def split_pairs(x, pair_layout):
    """Return the first and second element of each pair: j and j + R/2 (half), or 2j and 2j + 1."""
    return x.chunk(2, dim=-1) if pair_layout == "half" else (x[..., 0::2], x[..., 1::2])


def join_pairs(x1, x2, pair_layout):
    """Join the elements of pairs: the inverse of `split_pairs`."""
    if pair_layout == "half":
        return torch.cat((x1, x2), dim=-1)
    return torch.stack((x1, x2), dim=-1).flatten(-2)


def halves(table, pair_layout, rotary_dim, layout):
    """Return the table for the first and second of each pair, shaped to broadcast over heads."""
    table = over_heads(table, layout)
    if table.shape[-1] == rotary_dim:
        return split_pairs(table, pair_layout)
    return table, table


def over_heads(table, layout):
    """Return a table [B or 1, S, W], shaped to broadcast over the heads of `layout`."""
    match layout:
        case "BSND":
            return table[:, :, None]
        case "SBND":
            return table.transpose(0, 1)[:, :, None]
        case "BNSD":
            return table[:, None]
        case "TND":
            return table[0, :, None]
