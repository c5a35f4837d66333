"""Replaces the delta rule of decoding in SGLang 0.5.9; `gated_delta_net.py` in later versions.

To verify draft tokens, SGLang passes computed gates; npu-ops does not replace that call.
"""

from __future__ import annotations

from collections.abc import Iterable

import npu_ops
from npu_ops_adapters.patching import Patch, parameters
from npu_ops_adapters.sglang import functions, gated_delta_net


def patches() -> Iterable[Patch]:
    """Patch the function in SGLang's backend module; the backend looks it up when it is built."""
    if not functions.since("0.5.10"):
        names = parameters(ours)
        yield functions.replaced(
            f"{functions.gated_delta_net()}:fused_sigmoid_gating_delta_rule_update",
            "gated_delta_rule_update",
            ours,
            "on NPUs it skips the last head if the number of heads is odd",
            names[:-1],
            names,
        )


def ours(
    A_log, a, dt_bias, softplus_beta, softplus_threshold, q, k, v, b, initial_state_source,
    initial_state_indices, scale=None, use_qk_l2norm_in_kernel=False, cu_seqlens=None, is_kda=False,
):  # fmt: skip
    """Decode one token per sequence; q, k and v are `[1, B, heads, ...]`.

    initial_state_source: the pool of states, updated in place at initial_state_indices.
    """
    functions.check_device(q)
    functions.refuse(is_kda=is_kda)
    heads = v.shape[2]
    o = npu_ops.gated_delta_rule_update(
        (q[0], k[0], v[0]), a.reshape(-1, heads), b.reshape(-1, heads), A_log, dt_bias,
        initial_state_source, initial_state_indices, cu_seqlens=cu_seqlens, scale=scale,
        state_v_first=gated_delta_net.state_v_first(),
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, softplus_beta=softplus_beta,
        softplus_threshold=softplus_threshold,
    )  # fmt: skip
    return o[None]
