"""Replaces multimodal rotary embedding of transformers 4: each layer gets tables of three axes.

From transformers 5 on, the tables are merged once for all layers, and `rope` handles the calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

import npu_ops
from npu_ops.core import check
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.transformers import models, rope

_NAME = "apply_multimodal_rotary_pos_emb"


def patches() -> Iterable[Patch]:
    """Patch `apply_multimodal_rotary_pos_emb` of Qwen2-VL and Qwen2.5-VL."""
    yield from models.replaced(models.having(models.QWEN2_VL, _NAME), _NAME, "mrope", ours)


def ours(q, k, cos, sin, mrope_section, unsqueeze_dim=1) -> Callable:
    """Return the npu-ops call for this call of transformers; cos and sin are `[3, B, S, D]`."""
    check.tensor("cos", cos)
    check.tensor("sin", sin)
    if cos.dim() != 4 or cos.shape[0] != 3 or sin.dim() != 4:
        raise check.shape("cos", cos, "[3, B, S, D]")
    rope.ours_whole(q, k, cos[0], sin[0], unsqueeze_dim)
    dtype = torch.promote_types(q.dtype, cos.dtype)
    return functools.partial(
        npu_ops.apply_multimodal_rotary_pos_emb, q.to(dtype), k.to(dtype), cos, sin,
        list(mrope_section), unsqueeze_dim, section_layout="chunked", rotary_dim=cos.shape[-1],
    )  # fmt: skip
