"""Megatron-Bridge's Qwen3-VL for trainers that call it directly: fixes for NPUs and parallel ranks.

    nvtx            profiler marks that raise without CUDA
    process_groups  Megatron-LM's groups, if the trainer sets none
    deepstack       gradients of image features with sequence parallelism
    missing_names   a name that an earlier Megatron-LM lacks

`megatron.qwen3_vl` replaces operators and arguments of the same model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from npu_ops.core import hardware
from npu_ops_adapters.bridge import deepstack, missing_names, nvtx, process_groups
from npu_ops_adapters.patching import Patch


def patches() -> Iterable[Patch]:
    """Yield all patches, if the machine has an NPU or Megatron is not imported yet."""
    if "megatron" in sys.modules and not hardware.is_npu():
        return
    for module in (missing_names, process_groups, deepstack, nvtx):
        yield from module.patches()
