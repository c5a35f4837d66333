"""Replaces rotary embedding of text models and of vision towers.

In transformers 5 the three axes of multimodal positions are merged before these functions are
called. For Qwen2-VL in version 4, see `mrope`.
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
from npu_ops_adapters.transformers.equivalence import Draw, Variant

_NAME, _VISION = "apply_rotary_pos_emb", "apply_rotary_pos_emb_vision"
_TEXT_SIGNATURES = (
    ("q", "k", "cos", "sin", "unsqueeze_dim"),
    ("q", "k", "cos", "sin", "position_ids", "unsqueeze_dim"),
)


def patches() -> Iterable[Patch]:
    """Patch `apply_rotary_pos_emb`, and `apply_rotary_pos_emb_vision` of vision towers."""
    multimodal = models.having(models.QWEN2_VL, "apply_multimodal_rotary_pos_emb")
    whole = tuple(model for model in models.BY_NAME if model not in multimodal)
    yield from models.replaced(whole, _NAME, "rope", ours_whole, *_TEXT_SIGNATURES)
    linear = models.linear()
    yield from models.compared(linear, _NAME, "rope", _VARIANTS, *_TEXT_SIGNATURES)
    yield from models.replaced(models.VISION, _VISION, "rope", ours_vision)
    yield from models.compared(linear, _VISION, "rope", (Variant(ours_vision, _vision_calls),))


def _calls(function, width: int = 8) -> list[tuple]:
    """Return two small calls: in fp32, and of bf16 heads with fp32 tables, as under autocast."""
    draw = Draw()
    q, k = draw.normal(2, 4, 5, 8), draw.normal(2, 1, 5, 8)
    tables = draw.normal(2, 5, width), draw.normal(2, 5, width)
    return [(q, k, *tables), (q.bfloat16(), k.bfloat16(), *tables)]


def _partial_calls(function) -> list[tuple]:
    return _calls(function, width=4)


def _vision_calls(function) -> list[tuple]:
    draw = Draw()
    q, k, cos, sin = (draw.normal(5, *shape) for shape in ((4, 8), (4, 8), (8,), (8,)))
    return [(q, k, cos, sin), (q.bfloat16(), k.bfloat16(), cos, sin)]


def ours(q, k=None, cos=None, sin=None, position_ids=None, unsqueeze_dim=1) -> Callable:
    """Return the npu-ops call for this call of transformers; cos and sin are `[B, S, W]`.

    It rotates the first W elements of each head. k may be None. As in transformers, position_ids
    are ignored, and the result has the wider of q's and the tables' dtypes (autocast).
    """
    if isinstance(position_ids, int):  # transformers 5 passes unsqueeze_dim in this place
        position_ids, unsqueeze_dim = None, position_ids
    _check(q, q if k is None else k, cos, sin)
    check.one_of("unsqueeze_dim", unsqueeze_dim, (1, 2))
    if q.dim() != 4 or cos.dim() != 3:
        raise check.shape("cos", cos, f"[B, S, W], and q 4 dimensions (got {list(q.shape)})")
    dtype = torch.promote_types(q.dtype, cos.dtype)
    rotate = functools.partial(
        npu_ops.apply_rotary_pos_emb, q.to(dtype), k if k is None else k.to(dtype), cos, sin,
        unsqueeze_dim=unsqueeze_dim, rotary_dim=cos.shape[-1],
    )  # fmt: skip
    return rotate if k is not None else lambda: rotate()[0]


def ours_narrow(q, k, cos, sin, position_ids=None, unsqueeze_dim=1) -> Callable:
    """Return the call for models whose function rotates whole heads and returns q's dtype."""
    ours_whole(q, k, cos, sin, position_ids, unsqueeze_dim)
    if isinstance(position_ids, int):
        unsqueeze_dim = position_ids
    return functools.partial(
        npu_ops.apply_rotary_pos_emb, q, k, cos, sin,
        unsqueeze_dim=unsqueeze_dim, rotary_dim=cos.shape[-1],
    )  # fmt: skip


def ours_whole(q, k, cos, sin, position_ids=None, unsqueeze_dim=1) -> Callable:
    """Return the same call as `ours`, for models whose function always rotates whole heads."""
    call = ours(q, k, cos, sin, position_ids, unsqueeze_dim)
    if cos.shape[-1] != q.shape[-1]:
        raise check.shape("cos", cos, f"[B, S, {q.shape[-1]}]")
    return call


_VARIANTS = (
    Variant(ours, _partial_calls),
    Variant(ours_whole, _calls),
    Variant(ours_narrow, _calls),
)


def ours_vision(q, k, cos, sin) -> Callable:
    """Return the npu-ops call for this call of transformers. Both compute in fp32.

    q and k are `[T, N, D]`, cos and sin `[T, D]`.
    """
    _check(q, k, cos, sin)
    check.one_of("q's dtype", q.dtype, check.KERNEL_DTYPES)  # transformers rotates fp64 in fp32
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
        raise ValueError("cos: got a tensor that requires a gradient, needs one that does not")
    if not 0 < cos.shape[-1] <= q.shape[-1] or cos.shape[-1] % 2:
        raise check.shape("cos", cos, f"an even width, at most {q.shape[-1]}")
