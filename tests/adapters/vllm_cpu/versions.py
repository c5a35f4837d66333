"""What differs between 0.18.0 and 0.23.0, the versions of vLLM and vllm-ascend that run here."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable


def _installed() -> str | None:
    """Return the version of vllm-ascend; None where tests only read the names of the checks."""
    found = importlib.metadata.distributions(name="vllm_ascend")
    return next((distribution.version for distribution in found), None)


VERSION = _installed()
OLDER = VERSION == "0.18.0"
WORKER = "vllm_ascend.patch.worker"
MODULES = (
    f"{WORKER}.patch_triton",
    *(f"{WORKER}.patch_{name}" for name in ("gdn_attn", "qwen3_next") if OLDER),
    f"{WORKER}.patch_qwen3_5",
    f"{WORKER}.patch_qwen3vl",
    "vllm_ascend.ops.layernorm",
    "vllm_ascend.ops.register_custom_ops",
)
ABSENT = {"vllm.third_party.flash_linear_attention.ops.l2norm"}
if not OLDER:  # its file has gone
    ABSENT.add(f"{WORKER}.patch_qwen3_next")
# The classes whose `_forward_core` npu-ops replaces. In 0.23.0 both models have one class.
CORES = (
    (
        f"{WORKER}.patch_qwen3_next.Qwen3NextGatedDeltaNet",
        f"{WORKER}.patch_qwen3_5.Qwen3_5GatedDeltaNet",
    )
    if OLDER
    else (f"{WORKER}.patch_qwen3_5._GDN_PATCH_TARGET",)
)
# Modules in which `_forward_core` finds the chunked rule.
CHUNKED = (
    (f"{WORKER}.patch_qwen3_next", f"{WORKER}.patch_qwen3_5") if OLDER else ("vllm_ascend.ops.gdn",)
)


def only(version: str) -> Callable:
    """Mark a check of what another version does not have."""

    def marked(function):
        function.only = version
        return function

    return marked


def has(function: Callable, version: str | None) -> bool:
    """Return whether a check is for a version."""
    return getattr(function, "only", version) == version
