"""Rotary embedding of a vision tower, in fp32."""

from __future__ import annotations

from collections.abc import Iterable

import npu_ops
from npu_ops.core import check, env
from npu_ops_adapters import vision_tower
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.serving import check_device
from npu_ops_adapters.serving_rotary import pair_layout
from npu_ops_adapters.vllm import functions, rope
from npu_ops_adapters.vllm.vision_position import MODEL, TOWER


def patches() -> Iterable[Patch]:
    """Patch `AscendApplyRotaryEmb`; with NPU_OPS_CONSISTENT also the table of Qwen3-VL's tower."""
    yield functions.replaced(
        f"{rope.HOME}:AscendApplyRotaryEmb.forward_oot",
        "rope",
        ours,
        "it copies the table twice, and rotates in its dtype",
    )
    if env.settings.consistent:
        yield functions.replaced(
            f"{MODEL}:{TOWER}.rot_pos_emb",
            "rope",
            vision_tower.angles,
            "it rounds the table to the tower's dtype, and training does not",
            ("self", "grid_thw"),
        )


def ours(self, x, cos, sin):
    """Rotate x `[B, S, N, D]` or `[S, N, D]`; cos and sin are `[S, D / 2]`."""
    check_device(x)
    if x.dim() not in (3, 4) or 2 * cos.shape[-1] != x.shape[-1]:
        raise check.shape("x", x, f"[B, S, N, D] or [S, N, D], with D = {2 * cos.shape[-1]}")
    return npu_ops.apply_rotary_pos_emb(
        x,
        None,
        cos,
        sin,
        layout="TND" if x.dim() == 3 else "BSND",
        pair_layout=pair_layout(self.is_neox_style),
        rotary_dim=x.shape[-1],
    )[0]
