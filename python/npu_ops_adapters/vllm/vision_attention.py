"""With NPU_OPS_CONSISTENT, attention of a vision tower has the bits of training.

vllm-ascend calls the vendor's operators, which sum in another order.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

import npu_ops
from npu_ops.core import env, make
from npu_ops.core.hardware import is_captured
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.serving import check_device
from npu_ops_adapters.vllm import functions


def patches() -> Iterable[Patch]:
    """Patch `AscendMMEncoderAttention.forward_oot`."""
    if env.settings.consistent:
        yield functions.replaced(
            "vllm_ascend.ops.mm_encoder_attention:AscendMMEncoderAttention.forward_oot",
            "attention",
            ours,
            "the vendor's operators sum in another order than training",
        )


def ours(self, query, key, value, cu_seqlens=None, max_seqlen=None, sequence_lengths=None):
    """Attend within each image. Heads are `[B, S, N, D]` or `[B, S, N * D]`, as is the result."""
    check_device(query)
    if is_captured(query.device):
        raise ValueError("cudagraph_mm_encoder: got a vision tower in a graph, needs False")
    if cu_seqlens is None:
        batch, tokens = query.shape[:2]
        cu_seqlens = make.counted(batch + 1, device=query.device) * tokens
    starts = cu_seqlens.tolist()
    return npu_ops.attention(
        query.reshape(-1, self.num_heads, self.head_size),
        key.reshape(-1, self.num_kv_heads, self.head_size),
        value.reshape(-1, self.num_kv_heads, self.head_size),
        layout="TND",
        cu_seqlens_q=cu_seqlens.to(query.device, torch.int32),
        max_seqlen_q=max(b - a for a, b in zip(starts, starts[1:], strict=False)),
        cu_seqlens_cpu=starts,
        scale=self.scale,
    ).view(query.shape)
