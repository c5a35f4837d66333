"""slime on NPUs: patches with which slime's own `python train.py` trains without changes to it.

    accelerator     adds NPUs to slime's accelerators
    mindspeed       imports MindSpeed before Megatron-LM, and passes the run's arguments to it
    engine          rollout with an SGLang that is newer than slime expects
    resources       asks Ray for NPUs instead of GPUs
    process_groups  collectives that have new names in newer torch
    log_probs       with NPU_OPS_CONSISTENT, log-probabilities equal to a server's
    provider        arguments for Megatron-Bridge's models
    qwen3_next      Qwen3-Next's packed sequences and gradients, up to v0.2.2
    qwen3_5_vl      Qwen3.5 with pictures
    qwen3_vl        builds Qwen3-VL with Megatron-Bridge, for slime's --spec; no patch

The patches apply only in processes that have an NPU. `resources` applies wherever torch_npu is
installed, because slime's rollout manager has no NPU itself and asks for its engines' NPUs.
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
    """Import MindSpeed before slime's trainer is imported, in the driver or in a Ray worker."""
    if module == "slime.backends.megatron_utils" and hardware.is_npu():
        mindspeed.import_first()


def patches() -> Iterable[Patch]:
    """Yield all patches until slime is imported; afterwards, those that this process needs."""
    waiting = "slime" not in sys.modules
    if waiting or importlib.util.find_spec("torch_npu"):
        yield from resources.patches()
    if waiting or hardware.is_npu():
        for module in _ON_NPUS:
            yield from module.patches()
