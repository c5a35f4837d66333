"""Rotary position embedding."""

from __future__ import annotations

import torch

from npu_ops.core import check
from npu_ops.core.registry import explains
from npu_ops.ops.rope import arguments, op, packing
from npu_ops.ops.rope.freqs import apply_rotary_pos_emb_freqs

__all__ = ["apply_rotary_pos_emb", "apply_rotary_pos_emb_freqs"]


def apply_rotary_pos_emb(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | int | None = None,
    unsqueeze_dim: int = 1,
    *,
    layout: str | None = None,
    pair_layout: str = "half",
    rotary_dim: int | None = None,
    cu_seqlens: torch.Tensor | None = None,
    inverse: bool = False,
    inplace: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate q and k by their tokens' angles, in one launch.

    It accepts calls written for Hugging Face's function. It computes in fp32 (float64: in float64)
    and rounds once. Strided q and k (slices of a fused qkv) are read without a copy.

    Args:
        q: `[B, S, N, D]`, `[S, B, N, D]`, `[B, N, S, D]` or `[T, N, D]`; float32, bfloat16, float16
            or float64.
        k: like q, with any number of heads; or None.
        cos, sin: `[S, W]`, `[B, S, W]`, or `[T, W]` for TND, in any floating dtype. With
            position_ids or cu_seqlens also a table `[rows, W]` to take rows from. W is the rotary
            dimension R, or R / 2 with `rotary_dim=R`.
        position_ids: `[B, S]` or `[1, S]` (`[T]` for TND), rows of a `[rows, W]` table. Ignored
            with `[B, S, W]` tables, which are already gathered, as in Hugging Face. An int here is
            taken as unsqueeze_dim, the fifth argument of the function in transformers 5.
        unsqueeze_dim: as in Hugging Face: 1 if q is `[B, N, S, D]`, 2 if `[B, S, N, D]`. `layout`
            overrides it.
        layout: "BSND", "SBND", "BNSD" or "TND"; None: by unsqueeze_dim, TND for a 3-D q.
        pair_layout: "half" rotates j with j + R/2 (NeoX), "interleaved" 2j with 2j + 1 (GPT-J).
            Full-width tables use the same order.
        rotary_dim: R; elements from R on are copied. None: W. Required if W is half of D, which is
            ambiguous.
        cu_seqlens: `[n + 1]` with the leading 0, for TND: positions restart with each sequence, and
            cos, sin are `[rows, W]`. Results of tokens after the last sequence are 0.
        inverse: rotate back.
        inplace: write the results into q and k.

    Returns:
        The rotated q and k, with the shapes and dtypes of q and k; None if k is None.
        Differentiable in q and k.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: a shape or a device is invalid; a position is outside the table or lengths are
            invalid (on the CPU; on a device the tokens concerned become NaN); cos or sin require a
            gradient; or `inplace` is set and a gradient is needed.

    Source: transformers `apply_rotary_pos_emb`; Su et al., "RoFormer", 2021.
    """
    args = _prepare(
        q, k, cos, sin, position_ids, unsqueeze_dim, layout=layout, pair_layout=pair_layout,
        rotary_dim=rotary_dim, cu_seqlens=cu_seqlens, inverse=inverse, inplace=inplace,
    )  # fmt: skip
    return op.rotate(k, inplace, *args)


def _prepare(
    q, k, cos, sin, position_ids=None, unsqueeze_dim=1, *, layout=None, pair_layout="half",
    rotary_dim=None, cu_seqlens=None, inverse=False, inplace=False,
):  # fmt: skip
    """Check the public arguments; return the operator's inputs."""
    if isinstance(position_ids, int):  # transformers 5 passes unsqueeze_dim in this place
        position_ids, unsqueeze_dim = None, position_ids
    check.optional_tensors(position_ids=position_ids, cu_seqlens=cu_seqlens)
    layout = arguments.resolve_layout(q, layout, unsqueeze_dim)
    _check(q, k, cos, sin, position_ids, cu_seqlens, layout, pair_layout, inplace)
    rotary_dim = arguments.resolve_rotary_dim(rotary_dim, cos.shape[-1], q.shape[-1])
    positions = _positions(q, cos, position_ids, cu_seqlens)
    cos, sin = (table if table.dim() == 3 else table[None] for table in (cos, sin))
    k = arguments.k_or_no_heads(q, k, layout)
    return q, k, cos, sin, positions, layout, pair_layout, bool(inverse), rotary_dim


def _check(q, k, cos, sin, position_ids, cu_seqlens, layout, pair_layout, inplace) -> None:
    arguments.check_pair_layout(pair_layout)
    arguments.check_heads(q, k, layout)
    arguments.check_tables(cos, sin, q)
    if cos.dim() not in (2, 3) or (layout == "TND" and cos.dim() == 3):
        forms = "[T, W]" if layout == "TND" else "[S, W] or [B, S, W]"
        raise check.shape("cos", cos, forms)
    batch, length = arguments.size(q, layout, "B"), arguments.size(q, layout, "S")
    if cu_seqlens is not None:
        if layout != "TND" or position_ids is not None:
            raise ValueError("cu_seqlens: got a value, needs layout TND and no position_ids")
        arguments.check_cu_seqlens(cu_seqlens, q)
    elif cos.dim() == 3:  # already gathered
        arguments.check_table_size("cos", cos, 1, 0, batch, length, False)
    elif position_ids is None:
        arguments.check_table_size("cos", cos[None], 1, 0, batch, length, False)
    else:
        shapes = ((length,), (1, length), (batch, length))
        arguments.check_positions("position_ids", position_ids, shapes, cos.shape[0], q)
    if inplace:
        check.inplace({"q": q, "k": k}, {"cos": cos, "sin": sin, "position_ids": position_ids})


def _positions(q, cos, position_ids, cu_seqlens):
    """Return the tokens' rows of a [rows, W] table, [B or 1, S]; None: consecutive rows."""
    if cu_seqlens is not None:
        return packing.packed_positions(cu_seqlens, q.shape[0], cos.shape[0])
    if position_ids is None or cos.dim() == 3:
        return None
    return position_ids if position_ids.dim() == 2 else position_ids[None]


explains("apply_rotary_pos_emb", op.rotate.forward, _prepare)
