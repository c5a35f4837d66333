"""The gated delta rule of decoding, with the gates in the kernel."""

from __future__ import annotations

from collections.abc import Iterable

import npu_ops
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.serving import check_device
from npu_ops_adapters.vllm import functions


def patches() -> Iterable[Patch]:
    """Patch `fused_sigmoid_gating_delta_rule_update`, which vllm-ascend had up to 0.23.0."""
    yield functions.replaced(
        f"{functions.TRITON}.fla.sigmoid_gating:fused_sigmoid_gating_delta_rule_update",
        "gated_delta_rule_update",
        ours,
        "softplus overflows in it, and it copies a pool that is not contiguous",
    )


def ours(
    A_log, a, dt_bias, softplus_beta, softplus_threshold, q, k, v, b, initial_state_source,
    initial_state_indices, scale=None, use_qk_l2norm_in_kernel=False, cu_seqlens=None,
):  # fmt: skip
    """Run the rule; q, k and v are `[1, tokens, heads, ...]`. Return o.

    initial_state_source is the pool; a slot is `[HV, keys, values]`, and is updated in place.
    """
    check_device(q)
    if q.shape[0] != 1 or cu_seqlens is None:
        raise ValueError(f"q: got {list(q.shape)}, needs [1, tokens, H, K], with cu_seqlens")
    heads = v.shape[2]
    o = npu_ops.gated_delta_rule_update(
        (q[0], k[0], v[0]), a.reshape(-1, heads), b.reshape(-1, heads), A_log, dt_bias,
        initial_state_source, initial_state_indices[: cu_seqlens.shape[0] - 1],
        state_v_first=False, cu_seqlens=cu_seqlens, scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, softplus_beta=softplus_beta,
        softplus_threshold=softplus_threshold,
    )  # fmt: skip
    return o[None]
