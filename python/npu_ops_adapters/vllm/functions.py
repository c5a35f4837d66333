"""Shared by the ops here: patches of vllm-ascend's functions, and fingerprints of their source."""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections.abc import Callable

from npu_ops_adapters import serving

VERSIONS = "vllm-ascend 0.18.0, 0.23.0, main of August 2026"
TRITON = "vllm_ascend.ops.triton"

made = functools.partial(serving.made, "vllm-ascend")
# Make a patch of a function, also in the modules into which vllm-ascend has put it.
replaced = functools.partial(
    serving.replaced,
    "vllm-ascend",
    versions=VERSIONS,
    remove_when="vllm-ascend takes its operators from plugins",
)


def fingerprint(function: Callable) -> str:
    """Return a hash of a function's source without white space.

    Raises:
        OSError: the source is not available.
    """
    source = "".join(inspect.getsource(function).split())
    return hashlib.sha256(source.encode()).hexdigest()[:12]


def check_ranks() -> None:
    """Raise ValueError if ranks share the tokens of a prefill."""
    distributed = sys.modules.get("vllm.distributed.parallel_state")
    group = getattr(distributed, "_PCP", None)
    if group is not None and group.world_size > 1:
        raise ValueError(f"prefill context parallel: got {group.world_size} ranks, needs 1")
