"""Rotates q and k with torch_npu's operators.

`npu_apply_rotary_pos_emb` rotates both in one launch, if it supports the call. Otherwise
`npu_rotary_mul` rotates each.

The limits are from torch_npu's documentation of both operators, for Ascend910B and Ascend910_93.
"""

from __future__ import annotations

import torch

from npu_ops.core import check
from npu_ops.core.library import dtype_why_not, torch_npu_why_not
from npu_ops.ops.rope import reference

_BELOW = 896  # the operators support a rotary dimension below this
_IN_PLACE = (64, 128)  # head dimensions of npu_apply_rotary_pos_emb
# The rotary mode of torch_npu for each pair layout.
_MODES = {"half": "half", "interleaved": "interleave"}


def why_not(arguments) -> str | None:
    """Return None, or a sentence on why the operators do not support the arguments."""
    q, k, cos, sin = arguments[:4]
    tables = {cos.dtype, sin.dtype}
    if k.dtype != q.dtype or tables != {q.dtype}:
        got = ", ".join(check.short(x.dtype) for x in (q, k, cos, sin))
        return f"q, k, cos and sin are {got}, the vendor's operators take one dtype"
    if arguments.positions is not None:
        return "the vendor's operators take no positions"
    if arguments.rotary_dim >= _BELOW:
        return f"{arguments.rotary_dim} rotated elements, the vendor's operators take less than 896"
    if arguments.pair_layout == "interleaved" and cos.shape[0] > 1:
        return (
            "cos and sin differ by sequence, the vendor's operator takes one table for all "
            "sequences"
        )
    return dtype_why_not(q) or _missing()


def _missing() -> str | None:
    in_place = torch_npu_why_not("npu_apply_rotary_pos_emb", "layout", "rotary_mode")
    return torch_npu_why_not("npu_rotary_mul", "rotary_mode") or in_place


def rope(q, k, cos, sin, positions, layout, pair_layout, inverse, rotary_dim, q_out, k_out) -> None:
    """Write q_out and k_out; they may be q and k."""
    tables = _tables(cos, sin, pair_layout, inverse, rotary_dim)
    mode = _MODES[pair_layout]
    if _in_place_takes(q, k, q_out, k_out, layout, mode, rotary_dim):
        _in_place(q, k, *tables, q_out, k_out)
        return
    tables = [reference.over_heads(table, layout) for table in tables]
    for x, out in ((q, q_out), (k, k_out)):
        if x.numel():
            _rotate(x, *tables, mode, rotary_dim, out)


def _tables(cos, sin, pair_layout: str, inverse: bool, rotary_dim: int):
    """Return cos and sin in full width; for the inverse, with swapped and negated sines.

    The inverse of a rotation is its transpose, in which an element uses the sine of the other
    element of its pair.
    """
    if cos.shape[-1] != rotary_dim:
        cos, sin = (reference.join_pairs(x, x, pair_layout) for x in (cos, sin))
    if inverse:
        first, second = reference.split_pairs(sin, pair_layout)
        sin = -reference.join_pairs(second, first, pair_layout)
    return cos, sin


def _in_place_takes(q, k, q_out, k_out, layout: str, mode: str, rotary_dim: int) -> bool:
    """Return whether `npu_apply_rotary_pos_emb` rotates q and k in one launch."""
    return (
        layout in ("BSND", "TND")
        and mode == "half"
        and q.shape[-1] == k.shape[-1] == rotary_dim
        and rotary_dim in _IN_PLACE
        and q.numel() > 0
        and k.numel() > 0
        and q_out.is_contiguous()
        and k_out.is_contiguous()
    )


def _in_place(q, k, cos, sin, q_out, k_out) -> None:
    """Rotate q and k (BSND or TND) in one launch.

    TND tokens are passed as a batch of one, because older versions of the operator lack that
    layout.
    """
    outs = []
    for x, out in ((q, q_out), (k, k_out)):
        if out.data_ptr() != x.data_ptr():
            out.copy_(x)
        outs.append(out if out.dim() == 4 else out[None])
    shape = (*outs[0].shape[:2], 1, outs[0].shape[3])
    tables = [table[:, :, None].expand(shape).contiguous() for table in (cos, sin)]
    torch.ops.npu.npu_apply_rotary_pos_emb(*outs, *tables, "BSND", "half")


def _rotate(x, cos, sin, mode: str, rotary_dim: int, out) -> None:
    """Rotate x into `out`. cos, sin: shaped to broadcast over heads."""
    given = [t if t.dim() == 4 else t[None] for t in (x[..., :rotary_dim], cos, sin)]
    rotated = torch.ops.npu.npu_rotary_mul(*given, mode)
    out[..., :rotary_dim].copy_(rotated.view(out[..., :rotary_dim].shape))
    if rotary_dim < x.shape[-1] and out.data_ptr() != x.data_ptr():
        out[..., rotary_dim:].copy_(x[..., rotary_dim:])
