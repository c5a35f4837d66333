"""Rotary embedding of text and of images. Multimodal angles are ready where it is called.

In transformers 5, that is; what version 4 has for Qwen2-VL is in `mrope`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

import npu_ops
from npu_ops.core import check
from npu_ops_adapters.calls import check_device
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.transformers import models

WHOLE_HEADS = (*models.TEXT, *models.QWEN2_VL, *models.QWEN3_VL)
_TEXT_SIGNATURES = (
    ("q", "k", "cos", "sin", "unsqueeze_dim"),
    ("q", "k", "cos", "sin", "position_ids", "unsqueeze_dim"),
)


def patches() -> Iterable[Patch]:
    """`apply_rotary_pos_emb`, and `apply_rotary_pos_emb_vision` of vision towers."""
    multimodal = models.having(models.QWEN2_VL, "apply_multimodal_rotary_pos_emb")
    whole = tuple(model for model in WHOLE_HEADS if model not in multimodal)
    name = "apply_rotary_pos_emb"
    yield from models.replaced(whole, name, "rope", ours_whole, *_TEXT_SIGNATURES)
    yield from models.replaced(models.DELTA_NET, name, "rope", ours, *_TEXT_SIGNATURES)
    yield from models.replaced(
        models.VISION, "apply_rotary_pos_emb_vision", "rope", ours_vision, ("q", "k", "cos", "sin")
    )


def ours(q, k, cos, sin, position_ids=None, unsqueeze_dim=1) -> Callable:
    """Return the npu-ops call for this call of transformers, on the first elements of a head.

    Tables wider than q and k make the result wider, as theirs do (autocast). position_ids are not
    used by either.
    """
    if isinstance(position_ids, int):  # transformers 5 has unsqueeze_dim in this place
        position_ids, unsqueeze_dim = None, position_ids
    _check(q, k, cos, sin)
    check.one_of("unsqueeze_dim", unsqueeze_dim, (1, 2))
    if q.dim() != 4 or cos.dim() != 3:
        raise check.shape("cos", cos, f"[B, S, W], and q 4 dimensions (got {list(q.shape)})")
    dtype = torch.promote_types(q.dtype, cos.dtype)
    return functools.partial(
        npu_ops.apply_rotary_pos_emb, q.to(dtype), k.to(dtype), cos, sin,
        unsqueeze_dim=unsqueeze_dim, rotary_dim=cos.shape[-1],
    )  # fmt: skip


def ours_whole(q, k, cos, sin, position_ids=None, unsqueeze_dim=1) -> Callable:
    """As `ours`, for models whose function cannot rotate a part of each head."""
    call = ours(q, k, cos, sin, position_ids, unsqueeze_dim)
    if cos.shape[-1] != q.shape[-1]:
        raise check.shape("cos", cos, f"[B, S, {q.shape[-1]}]")
    return call


def ours_vision(q, k, cos, sin) -> Callable:
    """Return the npu-ops call for this call of transformers, which computes in fp32 as we do."""
    _check(q, k, cos, sin)
    check.one_of("q's dtype", q.dtype, check.FLOATS[:3])  # transformers rotates fp64 in fp32
    if q.dim() != 3 or cos.shape != (q.shape[0], q.shape[2]):
        raise check.shape("cos", cos, f"[T, D] of q (got {list(q.shape)})")
    return functools.partial(
        npu_ops.apply_rotary_pos_emb, q, k, cos, sin, layout="TND", rotary_dim=cos.shape[-1]
    )


def _check(q, k, cos, sin) -> None:
    for name, x in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        check.floating(name, x)
        check.same_device(name, x, "q", q)
        check.one_of(f"{name}'s dtype", x.dtype, check.FLOATS)
    check_device(q)
    if k.dtype != q.dtype or k.dim() != q.dim() or k.shape[-1] != q.shape[-1]:
        raise check.shape("k", k, f"q's dtype {q.dtype} and head dimension {q.shape[-1]}")
    if sin.shape != cos.shape or sin.dtype != cos.dtype:
        raise check.shape("sin", sin, f"cos's shape {list(cos.shape)} and dtype {cos.dtype}")
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise ValueError("cos: got one that requires a gradient, needs one that does not")
    if not 0 < cos.shape[-1] <= q.shape[-1] or cos.shape[-1] % 2:
        raise check.shape("cos", cos, f"an even width, at most {q.shape[-1]}")
