"""Replaces torch.cuda.nvtx's `range_push` and `range_pop` by no-ops: without CUDA they raise.

Bridge's Qwen3-VL calls both to mark steps for CUDA's profiler. MindSpeed core_r0.16 replaces them,
too, but its `range_pop` requires an argument. torch's takes none, and Bridge passes none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

import torch

from npu_ops_adapters.patching import Patch

MODEL = "megatron.bridge.models.qwen_vl.modelling_qwen3_vl.model"


def patches() -> Iterable[Patch]:
    """Patch torch's functions if Bridge's model is imported and torch is built without CUDA."""
    if MODEL not in sys.modules or torch.backends.cuda.is_built():
        return
    for name in ("range_push", "range_pop"):
        yield Patch(
            target=f"torch.cuda.nvtx:{name}",
            op="bridge_nvtx",
            make=_skip,
            why=(
                "Megatron-Bridge calls this function in each step, and it raises an error "
                "without CUDA"
            ),
            signatures=(),  # not checked: torch's or MindSpeed's function
            versions="Megatron-Bridge 0.3.1",
            remove_when="Megatron-Bridge checks for a profiler first",
            rebind=False,
        )


def _skip(original: Callable) -> Callable:
    def npu_ops_skip(*message):
        return None

    return npu_ops_skip
