"""With NPU_OPS_CONSISTENT, vllm-ascend selects a token's experts as training does.

The experts' products and sum are torch_npu's operators, which `npu_ops.consistent` replaces.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from npu_ops.core import env
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.serving import refuse
from npu_ops_adapters.vllm import functions

_ARGUMENTS = (
    "hidden_states", "router_logits", "top_k", "use_grouped_topk", "renormalize",
    "e_score_correction_bias", "topk_group", "num_expert_group", "scoring_func",
    "routed_scaling_factor",
)  # fmt: skip


def patches() -> Iterable[Patch]:
    """Patch the function that calls vllm-ascend's operator."""
    if env.settings.consistent:
        yield functions.replaced(
            "vllm_ascend.ops.fused_moe.experts_selector:_select_experts_with_fusion_ops",
            "grouped_linear",
            ours,
            "its softmax and its sum have other roundings than training",
            (*_ARGUMENTS, "global_num_experts"),
            (*_ARGUMENTS, "tid2eid", "input_ids"),
        )


def ours(
    hidden_states, router_logits, top_k, use_grouped_topk, renormalize, e_score_correction_bias,
    topk_group, num_expert_group, scoring_func="softmax", routed_scaling_factor=1.0, **unused,
):  # fmt: skip
    """Return fp32 weights `[T, K]` and int32 experts `[T, K]`, in descending order of weight."""
    refuse(use_grouped_topk=use_grouped_topk, e_score_correction_bias=e_score_correction_bias)
    if scoring_func != "softmax" or routed_scaling_factor != 1.0:
        got = f"{scoring_func!r} and {routed_scaling_factor}"
        raise ValueError(
            f"scoring_func and routed_scaling_factor: got {got}, needs 'softmax' and 1.0"
        )
    weights, index = router_logits.softmax(-1, dtype=torch.float32).topk(top_k)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, index.int()
