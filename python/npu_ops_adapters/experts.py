"""Shared by transformers and sglang: a mixture of experts, in one order of sums.

With NPU_OPS_CONSISTENT a server's experts and a trainer's are these: each product is
`npu_ops.grouped_linear`; a token's results are rounded, weighted, rounded, and added in the order
in which the router names the experts.
"""

from __future__ import annotations

import torch

import npu_ops
from npu_ops.core import make


def experts(x, gate_up, down, index, weights, activation=torch.nn.functional.silu) -> torch.Tensor:
    """`[T, H]`: the weighted sum of each token's experts.

    x: `[T, H]`. gate_up: `[E, 2 I, H]`. down: `[E, H, I]`. index, weights: `[T, K]`, the experts of
    each token, and their weights, which are rounded to x's dtype. An expert of E or more adds 0.
    """
    tokens, chosen = index.shape
    by_expert, order = index.reshape(-1).sort(stable=True)
    here = torch.arange(gate_up.shape[0], dtype=by_expert.dtype, device=x.device)
    offs = torch.searchsorted(by_expert, here, right=True, out_int32=True)
    rows = npu_ops.grouped_linear(x[order // chosen], gate_up, offs)
    gate, up = rows.chunk(2, -1)
    rows = npu_ops.grouped_linear(activation(gate) * up, down, offs)
    rows = rows * weights.to(x.dtype).reshape(-1)[order, None]
    back = torch.empty_like(order).scatter_(0, order, make.counted(len(order), device=x.device))
    return rows[back].view(tokens, chosen, x.shape[1]).sum(1)
