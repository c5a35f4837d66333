"""Sums gradients of Qwen3-VL's deepstack features over ranks that use sequence parallelism.

Each rank uses only the features of its own tokens, so it has only their gradients. Bridge averages
the vision tower's gradients over ranks as if each rank had the gradients of all tokens. The result
is too small, on GPUs too. This patch sums the gradients over the ranks before Bridge averages.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable

from npu_ops.core import log
from npu_ops_adapters.bridge.nvtx import MODEL
from npu_ops_adapters.patching import Patch

_SUM = "copy_to_tensor_model_parallel_region"  # an identity whose backward sums over ranks


def patches() -> Iterable[Patch]:
    """Patch the function that selects a rank's features under sequence parallelism."""
    yield Patch(
        target=f"{MODEL}:split_deepstack_embs",
        op="bridge_deepstack",
        make=_summed,
        why="each rank keeps only the gradients of its own tokens' features",
        signatures=(),  # not checked: it may be Bridge's function, or MindSpeed's wrapper of it
        versions="Megatron-Bridge 0.3.1",
        remove_when="Megatron-Bridge adds the gradients of all ranks",
        rebind=False,
        why_not=_why_not,
    )


def _why_not(split: Callable) -> str | None:
    if _SUM in inspect.getsource(sys.modules[MODEL]):
        return "Megatron-Bridge adds these gradients itself"
    return None


def _summed(original: Callable) -> Callable:
    own = inspect.unwrap(original)
    # MindSpeed core_r0.16 passes an argument that Bridge's function accepts only in later versions.
    lacks = "sequence_parallel" not in inspect.signature(own).parameters
    split = own if lacks else original

    @functools.wraps(original)
    def npu_ops_split(masks, embeds, *args, **sizes):
        if embeds is not None:
            log.once(
                "Megatron-Bridge loses gradients of deepstack's features with sequence parallelism:"
                " npu-ops adds them; NPU_OPS_DISABLE=bridge_deepstack turns this off"
            )
            parallel = importlib.import_module("megatron.core.tensor_parallel")
            embeds = [getattr(parallel, _SUM)(x) for x in embeds]
        return split(masks, embeds, *args, **sizes)

    return npu_ops_split
