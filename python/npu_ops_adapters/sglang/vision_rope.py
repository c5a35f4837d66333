"""Rotary embedding of a vision tower, in fp32 on every device."""

from __future__ import annotations

from collections.abc import Iterable

import torch

import npu_ops
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.sglang import functions


def patches() -> Iterable[Patch]:
    """The name that towers import; which function it is depends on the machine."""
    yield functions.replaced(
        f"{functions.rotary_embedding('utils')}:apply_rotary_pos_emb",
        "rope",
        ours,
        "on NPUs it multiplies in the heads' dtype; elsewhere it is compiled, for a minute",
        ("q", "k", "cos", "sin", "unsqueeze_dim"),
        rebind=False,  # its module has it under two names
    )


def ours(q, k, cos, sin, unsqueeze_dim=1):
    """q and k are `[T, heads, D]`, cos and sin `[T, D]`."""
    functions.check_device(q)
    if torch.compiler.is_compiling():
        raise functions.NotOursError("SGLang has chosen what is compiled")
    if q.dim() != 3 or unsqueeze_dim != 1:
        raise ValueError(f"q: got shape {list(q.shape)}, needs [T, heads, D]")
    return npu_ops.apply_rotary_pos_emb(q, k, cos, sin, layout="TND")
