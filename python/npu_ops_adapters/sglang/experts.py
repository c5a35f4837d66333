"""With NPU_OPS_CONSISTENT, SGLang routes tokens and computes experts as a trainer does.

Each expert's result is rounded, multiplied by its routing weight, rounded, and added in order of
expert id. On NPUs SGLang calls torch_npu's operators for that, which `npu_ops.consistent` replaces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch

import npu_ops
from npu_ops.consistent.experts import weighted_sum
from npu_ops.core import env, make
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.sglang import functions

_WHY = "it rounds the sum of a token's experts differently from training"


def patches() -> Iterable[Patch]:
    """Yield the patches, or nothing without NPU_OPS_CONSISTENT."""
    if not env.settings.consistent:
        return
    if functions.on_npu():
        yield functions.replaced(
            "sglang.srt.hardware_backend.npu.moe.topk:fused_topk_npu", "grouped_linear", choose,
            "it rounds the weights of a token's experts before it adds them", optional=True,
        )  # fmt: skip
    else:
        target = "sglang.srt.layers.moe.fused_moe_native:moe_forward_native"
        yield functions.replaced(target, "grouped_linear", ours, _WHY)
        target = "sglang.srt.models.qwen2_moe:fused_gate_sigmoid_mul_add"
        yield functions.replaced(target, "linear", add_shared, _WHY, optional=True)


def choose(
    hidden_states, router_logits, topk_config, num_token_non_padded=None,
    expert_location_dispatch_info=None, layer_id=None,
):  # fmt: skip
    """Route tokens with SGLang's PyTorch code, which it also runs on CPUs."""
    from sglang.srt.layers.moe.topk import select_experts

    return select_experts(
        hidden_states, router_logits, dataclasses.replace(topk_config, torch_native=True),
        layer_id=layer_id, num_token_non_padded=num_token_non_padded,
        expert_location_dispatch_info=expert_location_dispatch_info,
    )  # fmt: skip


def ours(layer, x, topk_output, moe_runner_config):
    """Return the weighted sum of each token's experts, in place of SGLang's function."""
    functions.refuse(
        **{name: getattr(layer, name, None) for name in ("w13_weight_bias", "w2_weight_bias")},
        apply_router_weight_on_input=moe_runner_config.apply_router_weight_on_input,
        gemm1_alpha=moe_runner_config.gemm1_alpha,
    )
    if moe_runner_config.activation != "silu":
        raise ValueError(f"activation: got {moe_runner_config.activation!r}, needs 'silu'")
    weights, index, _ = topk_output
    return experts(x, layer.w13_weight, layer.w2_weight, index, weights)


def experts(x, gate_up, down, index, weights) -> torch.Tensor:
    """Return the weighted sum of each token's experts, `[T, H]`.

    x: `[T, H]`. gate_up: `[E, 2 I, H]`. down: `[E, H, I]`.
    index, weights: `[T, K]`, each token's expert ids and routing weights; the weights are rounded
    to x's dtype. An id of E or more adds 0.
    """
    tokens, chosen = index.shape
    by_expert, order = index.reshape(-1).sort(stable=True)
    here = torch.arange(gate_up.shape[0], dtype=by_expert.dtype, device=x.device)
    offs = torch.searchsorted(by_expert, here, right=True, out_int32=True)
    rows = npu_ops.grouped_linear(x[order // chosen], gate_up, offs)
    gate, up = rows.chunk(2, -1)
    rows = npu_ops.grouped_linear(torch.nn.functional.silu(gate) * up, down, offs)
    back = torch.empty_like(order).scatter_(0, order, make.counted(len(order), device=x.device))
    return weighted_sum(rows, back.view(tokens, chosen), weights)


def add_shared(hidden_states, gate_weight, shared_output, final_hidden_states):
    """Add the shared expert's gated output in place, as SGLang's function does."""
    gate = torch.nn.functional.linear(hidden_states, gate_weight[None])
    final_hidden_states += torch.sigmoid(gate) * shared_output
