"""Megatron-Bridge's Qwen3-VL, where a trainer calls it itself: on NPUs, in parallel over ranks.

    nvtx            marks for CUDA's profiler, which raise without CUDA
    process_groups  those of Megatron-LM, where the trainer sets none
    deepstack       gradients of pictures' features, with sequence parallelism
    missing_names   what an earlier Megatron-LM lacks

Operators and arguments of the same model are in `megatron.qwen3_vl`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from npu_ops.core import hardware
from npu_ops_adapters.bridge import deepstack, missing_names, nvtx, process_groups
from npu_ops_adapters.patching import Patch


def patches() -> Iterable[Patch]:
    """All of them, on a machine with an NPU."""
    if "megatron" in sys.modules and not hardware.is_npu():
        return
    for module in (missing_names, process_groups, deepstack, nvtx):
        yield from module.patches()
