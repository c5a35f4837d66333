"""A stand-in for vllm-ascend's native module: its operators for a Qwen model, in torch.

The wheel's module needs CANN. The schemas are those that it registers.
"""

from __future__ import annotations

import torch
import torch_npu

SCHEMAS = (
    "npu_add_rms_norm_bias(Tensor x1, Tensor x2, Tensor gamma, Tensor? beta=None, "
    "float epsilon=1e-6) -> (Tensor y, Tensor rstd, Tensor x)",
    "moe_gating_top_k(Tensor x, int k, int k_group, int group_count, int group_select_mode, "
    "int renorm, int norm_type, bool out_flag, float routed_scaling_factor, float eps, "
    "Tensor? bias_opt=None) -> (Tensor y, Tensor expert_idx, Tensor out)",
    "npu_moe_init_routing_custom(Tensor x, Tensor expert_idx, *, Tensor? scale=None, "
    "Tensor? offset=None, int active_num=-1, int expert_capacity=-1, int expert_num=-1, "
    "int drop_pad_mode=0, int expert_tokens_num_type=0, bool expert_tokens_num_flag=False, "
    "int quant_mode=0, int[2] active_expert_range=[], int row_idx_type=0) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
library = torch.library.Library("_C_ascend", "DEF")


def npu_add_rms_norm_bias(x1, x2, gamma, beta=None, epsilon=1e-6):
    total = x1 + x2
    scale = total.float().square().mean(-1, keepdim=True).add(epsilon).rsqrt()
    y = (total.float() * scale * gamma.float()).to(total.dtype)
    return y if beta is None else y + beta, scale, total


def moe_gating_top_k(
    x, k, k_group, group_count, group_select_mode, renorm, norm_type, out_flag,
    routed_scaling_factor, eps, bias_opt=None,
):  # fmt: skip
    assert k_group == group_count == 1 and norm_type == 0 and bias_opt is None
    weights, experts = x.float().softmax(-1).topk(k)
    if renorm:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return (weights * routed_scaling_factor).to(x.dtype), experts.int(), x


def npu_moe_init_routing_custom(x, expert_idx, **settings):
    return torch_npu.npu_moe_init_routing_v2(x, expert_idx, **settings)


for schema in SCHEMAS:
    library.define(schema)
    name = schema.partition("(")[0]
    for key in ("PrivateUse1", "Meta"):
        library.impl(name, globals()[name], key)
