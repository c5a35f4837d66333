"""With NPU_OPS_CONSISTENT, SGLang's experts are a trainer's: see npu_ops_adapters/experts.py"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from npu_ops.core import env
from npu_ops_adapters.experts import experts
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.sglang import functions

_WHY = "it adds the experts of a token in other roundings than training"


def patches() -> Iterable[Patch]:
    """On CPUs, where the same numbers as in training are asked for."""
    if env.settings.consistent:
        target = "sglang.srt.layers.moe.fused_moe_native:moe_forward_native"
        yield functions.replaced(target, "grouped_linear", ours, _WHY)
        target = "sglang.srt.models.qwen2_moe:fused_gate_sigmoid_mul_add"
        yield functions.replaced(target, "linear", add_shared, _WHY, optional=True)


def ours(layer, x, topk_output, moe_runner_config):
    """SGLang's function."""
    functions.refuse(
        **{name: getattr(layer, name, None) for name in ("w13_weight_bias", "w2_weight_bias")},
        apply_router_weight_on_input=moe_runner_config.apply_router_weight_on_input,
        gemm1_alpha=moe_runner_config.gemm1_alpha,
    )
    if moe_runner_config.activation != "silu":
        raise ValueError(f"activation: got {moe_runner_config.activation!r}, needs 'silu'")
    weights, index, _ = topk_output
    return experts(x, layer.w13_weight, layer.w2_weight, index, weights)


def add_shared(hidden_states, gate_weight, shared_output, final_hidden_states):
    """SGLang's function: the expert of all tokens, opened by a gate, is added in place."""
    gate = torch.nn.functional.linear(hidden_states, gate_weight[None])
    final_hidden_states += torch.sigmoid(gate) * shared_output
