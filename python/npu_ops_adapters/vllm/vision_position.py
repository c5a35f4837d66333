"""Position embedding of Qwen3-VL's vision tower: a square table, interpolated to a grid."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch

from npu_ops_adapters import vision_tower
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.serving import check_device
from npu_ops_adapters.vllm import functions
from npu_ops_adapters.vllm.qk_norm_rope import WORKER

TOWER = "Qwen3_VisionTransformer"
MODEL = "vllm.model_executor.models.qwen3_vl"


def patches() -> Iterable[Patch]:
    """Patch vLLM's method, and its replacement in later versions of vllm-ascend."""
    worker = f"{WORKER}.patch_qwen3vl"
    for home in (MODEL, *([worker] if hasattr(sys.modules.get(worker), TOWER) else [])):
        yield functions.replaced(
            f"{home}:{TOWER}.fast_pos_embed_interpolate",
            "vision_position",
            ours,
            "in fp32 a grid point falls beside the table's row that it is on; weights are rounded",
        )


def ours(self, grid_thw) -> torch.Tensor:
    """Return the position embedding of images, `[T, D]`."""
    check_device(self.pos_embed.weight)
    return vision_tower.position_embedding(self, grid_thw)
