"""Replaces rotary embedding of vision towers; npu-ops computes it in fp32 on every device."""

from __future__ import annotations

from collections.abc import Iterable

import torch

import npu_ops
from npu_ops.core import env
from npu_ops_adapters import vision_tower
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.sglang import functions


def patches() -> Iterable[Patch]:
    """Patch `apply_rotary_pos_emb`, which vision towers import.

    SGLang binds that name to a different function on each kind of device. With NPU_OPS_CONSISTENT
    also patch the method that makes the angles of Qwen3-VL and Qwen3.5.
    """
    yield functions.replaced(
        f"{functions.rotary_embedding('utils')}:apply_rotary_pos_emb",
        "rope",
        ours,
        "on NPUs it multiplies in the heads' dtype; elsewhere it is compiled, for a minute",
        ("q", "k", "cos", "sin", "unsqueeze_dim"),
        rebind=False,  # its module holds it under a second name, which is not replaced
    )
    if env.settings.consistent:
        yield functions.replaced(
            "sglang.srt.models.qwen3_vl:Qwen3VLMoeVisionModel.rot_pos_emb", "rope",
            vision_tower.angles,
            "it rounds the table to the tower's dtype, and training does not", ("self", "grid_thw"),
            by="", optional=True,
        )  # fmt: skip


def ours(q, k, cos, sin, unsqueeze_dim=1):
    """Rotate q and k `[T, heads, D]`; cos and sin are `[T, D]`."""
    functions.check_device(q)
    if torch.compiler.is_compiling():
        raise functions.NotOursError("SGLang chooses the functions that torch.compile traces")
    if q.dim() != 3 or unsqueeze_dim != 1:
        raise ValueError(f"q: got shape {list(q.shape)}, needs [T, heads, D]")
    return npu_ops.apply_rotary_pos_emb(q, k, cos, sin, layout="TND")
