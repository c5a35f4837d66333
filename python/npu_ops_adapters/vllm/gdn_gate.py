"""The gates of Gated Delta Net: decay and beta."""

from __future__ import annotations

from collections.abc import Iterable

import npu_ops
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.serving import check_device
from npu_ops_adapters.vllm import functions


def patches() -> Iterable[Patch]:
    """Replace vllm-ascend's `fused_gdn_gating_patch`."""
    yield functions.replaced(
        f"{functions.TRITON}.fused_gdn_gating:fused_gdn_gating_patch",
        "gdn_gate",
        ours,
        "softplus overflows in it before it is replaced, and it is tiled by 8 heads",
    )


def ours(A_log, a, b, dt_bias, beta=1.0, threshold=20.0):
    """Return g `[1, T, HV]` in fp32, and beta in b's dtype."""
    check_device(a)
    g, update = npu_ops.gdn_gate(
        a, A_log, dt_bias, b, softplus_beta=beta, softplus_threshold=threshold
    )
    return g[None], update[None]
