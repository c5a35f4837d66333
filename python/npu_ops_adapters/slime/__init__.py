"""slime on NPUs: what slime lacks there, so that its own `python train.py` trains unchanged.

    accelerator     the NPU among slime's accelerators
    mindspeed       MindSpeed before Megatron-LM, and its features by the arguments of the run
    engine          SGLang newer than slime's, as rollout
    resources       NPUs where slime asks Ray for GPUs
    process_groups  collectives that newer torch calls by new names
    log_probs       with NPU_OPS_CONSISTENT, a server's log-probabilities
    provider        arguments for Megatron-Bridge's models
    qwen3_next      Qwen3-Next's packed sequences and gradients, up to v0.2.2
    qwen3_5_vl      Qwen3.5 with pictures
    qwen3_vl        Qwen3-VL by Megatron-Bridge, for slime's --spec

slime is changed only in processes that have an NPU. What it asks of Ray is changed wherever
torch_npu is installed: slime's rollout manager has no NPU and asks for those of its engines.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable

from npu_ops.core import hardware
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.slime import (
    accelerator,
    engine,
    log_probs,
    mindspeed,
    process_groups,
    provider,
    qwen3_5_vl,
    qwen3_next,
    resources,
)

_ON_NPUS = (
    accelerator, engine, log_probs, mindspeed, process_groups, provider, qwen3_5_vl, qwen3_next,
)  # fmt: skip


def awaited(module: str) -> None:
    """slime's trainer is about to be imported, in the driver or in one of Ray's workers."""
    if module == "slime.backends.megatron_utils" and hardware.is_npu():
        mindspeed.import_first()


def patches() -> Iterable[Patch]:
    """All of them until slime is imported; then those that this process is for."""
    waiting = "slime" not in sys.modules
    if waiting or importlib.util.find_spec("torch_npu"):
        yield from resources.patches()
    if waiting or hardware.is_npu():
        for module in _ON_NPUS:
            yield from module.patches()
