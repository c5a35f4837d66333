"""The l2norm of queries and keys."""

from __future__ import annotations

from collections.abc import Iterable

import npu_ops
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.serving import check_device
from npu_ops_adapters.vllm import functions

_MODULES = (
    f"{functions.TRITON}.fla.l2norm",
    "vllm.model_executor.layers.fla.ops.l2norm",
    "vllm.third_party.flash_linear_attention.ops.l2norm",
)


def patches() -> Iterable[Patch]:
    """Patch `l2norm_fwd`: vllm-ascend's, and vLLM's, which moved in 2026."""
    for module in _MODULES:
        yield functions.replaced(
            f"{module}:l2norm_fwd",
            "l2norm",
            ours,
            "it is tiled by 69 rows whatever their width",
        )


def ours(x, eps=1e-6, output_dtype=None):
    """Return `x / sqrt(sum(x^2) + eps)` of each row."""
    check_device(x)
    return npu_ops.l2norm(x, eps, output_dtype)
