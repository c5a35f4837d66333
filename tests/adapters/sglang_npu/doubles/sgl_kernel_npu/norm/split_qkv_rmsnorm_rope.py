"""By npu-ops: what its adapter computes where the kernel cannot."""

import torch
from npu_ops_adapters.sglang.split_qkv_rmsnorm_rope import compute as split_qkv_rmsnorm_rope


def split_qkvgate_gemma_rmsnorm_rope(
    input, sin, cos, q_hidden_size, kv_hidden_size, head_dim, rope_dim, eps, q_weight, k_weight
):
    """A head's query comes with its gate behind it; weights are beside 1."""
    fused, k, v = input.split([2 * q_hidden_size, kv_hidden_size, kv_hidden_size], dim=-1)
    q, gate = (x.flatten(1) for x in fused.unflatten(-1, (-1, 2, head_dim)).unbind(2))
    q, k, v = split_qkv_rmsnorm_rope(
        torch.cat((q, k, v), dim=-1), sin, cos, q_hidden_size, kv_hidden_size, head_dim,
        eps=eps, q_weight=1 + q_weight.float(), k_weight=1 + k_weight.float(),
    )  # fmt: skip
    return q, k, v, gate


__all__ = ["split_qkv_rmsnorm_rope", "split_qkvgate_gemma_rmsnorm_rope"]
