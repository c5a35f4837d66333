"""Replaces the gates of Gated Delta Net in prefill; in decoding, the delta rule computes them."""

from __future__ import annotations

from collections.abc import Iterable

import npu_ops
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.sglang import functions


def patches() -> Iterable[Patch]:
    """Patch `fused_gdn_gating` in the module of the Gated Delta Net backend."""
    yield functions.replaced(
        f"{functions.gated_delta_net()}:fused_gdn_gating",
        "gdn_gate",
        ours,
        "its softplus overflows before a threshold replaces it, and on NPUs it has tiles "
        "of 8 heads",
        rebind=False,  # do not replace it under a second name in the same module
    )


def ours(A_log, a, b, dt_bias, beta=1.0, threshold=20.0):
    """Return g and beta `[1, T, HV]` in fp32."""
    functions.check_device(a)
    softplus = {"softplus_beta": beta, "softplus_threshold": threshold}
    g, update = npu_ops.gdn_gate(a, A_log, dt_bias, b, **softplus)
    return g[None], update.float()[None]
