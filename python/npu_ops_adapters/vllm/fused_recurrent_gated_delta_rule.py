"""The gated delta rule token by token: verification of draft tokens."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import npu_ops
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.serving import NotOursError, check_device
from npu_ops_adapters.vllm import functions

MODULE = "vllm.model_executor.layers.fla.ops.fused_recurrent"


def patches() -> Iterable[Patch]:
    """Patch vLLM's `fused_recurrent_gated_delta_rule`, whose kernel vllm-ascend 0.18.0 replaces."""
    yield functions.replaced(
        f"{MODULE}:fused_recurrent_gated_delta_rule",
        "fused_recurrent_gated_delta_rule",
        ours,
        "a kernel for each 32 values of a head, which reads all slots of padding",
    )


def ours(
    q, k, v, g, beta=None, scale=None, initial_state=None, inplace_final_state=True,
    cu_seqlens=None, ssm_state_indices=None, num_accepted_tokens=None,
    use_qk_l2norm_in_kernel=False,
):  # fmt: skip
    """Run the rule; q, k and v are `[1, tokens, heads, ...]`. Return o and initial_state.

    initial_state is the pool of states, which is updated in place.
    """
    check_device(q)
    _check_order()
    if beta is None or cu_seqlens is None or ssm_state_indices is None or not inplace_final_state:
        raise ValueError("got another call than that of a server with a pool of states")
    if q.shape[0] != 1 or beta.dim() != 3:
        raise ValueError(f"beta: got {list(beta.shape)}, needs [1, tokens, HV]")
    count = cu_seqlens.shape[0] - 1
    o = npu_ops.gated_delta_rule_update(
        (q[0], k[0], v[0]), g[0], beta[0], None, None, initial_state, ssm_state_indices[:count],
        state_v_first=False, cu_seqlens=cu_seqlens, scale=scale,
        num_accepted_tokens=None if num_accepted_tokens is None else num_accepted_tokens[:count],
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return o[None], initial_state


def _check_order() -> None:
    """Raise NotOursError unless vllm-ascend's kernel is set, whose states are `[keys, values]`.

    The states of vLLM's own kernel are `[values, keys]`.
    """
    kernel = getattr(sys.modules[MODULE], "fused_recurrent_gated_delta_rule_fwd_kernel", None)
    while hasattr(kernel, "fn"):  # unwrap Triton's decorators
        kernel = kernel.fn
    if not (getattr(kernel, "__module__", None) or "").startswith("vllm_ascend."):
        raise NotOursError("the kernel is not vllm-ascend's")
