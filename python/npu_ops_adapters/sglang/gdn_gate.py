"""The gates of Gated Delta Net, before a prefill; later they are part of the delta rule."""

from __future__ import annotations

from collections.abc import Iterable

import npu_ops
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.sglang import functions


def patches() -> Iterable[Patch]:
    """`fused_gdn_gating`, as the backend of Gated Delta Net holds it."""
    yield functions.replaced(
        f"{functions.gated_delta_net()}:fused_gdn_gating",
        "gdn_gate",
        ours,
        "softplus overflows in it before it is replaced, and on NPUs it is tiled by 8 heads",
        ("A_log", "a", "b", "dt_bias", "beta", "threshold"),
        rebind=False,  # its module may have it under a second name
    )


def ours(A_log, a, b, dt_bias, beta=1.0, threshold=20.0):
    """g and beta `[1, T, HV]` in fp32. The threshold only keeps SGLang's from overflowing."""
    functions.check_device(a)
    if beta != 1 or threshold < 20:
        raise ValueError(f"beta, threshold: got {beta} and {threshold}, needs 1 and 20 or more")
    g, update = npu_ops.gdn_gate(a, A_log, dt_bias, b)
    return g[None], update.float()[None]
