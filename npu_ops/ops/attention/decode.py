"""Attention of one query a sequence on the CPU, by native code that reads a cache where it lies.

A server's step is that: torch's flash attention would need each sequence's keys gathered.
"""

from __future__ import annotations

import torch

from npu_ops.core import library
from npu_ops.core.registry import from_native
from npu_ops.ops.attention.arguments import Extra, Rule

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_forward = from_native(
    "attention_decode_cpu(Tensor q, Tensor k, Tensor v, Tensor? block_table, Tensor seqlens_k, "
    "float scale, Tensor(a!) out, Tensor(b!) lse) -> ()"
)()


def serves(q, extra: Extra, rule: Rule) -> bool:
    """Whether the native code computes these: each sequence has one query, which sees all keys."""
    one = q.shape[2] == 1 and extra.cu_seqlens_q is None and extra.seqlens_k is not None
    last = rule.window_right < 0 or (rule.window_right == 0 and rule.bottom_right)
    seen = last and rule.window_left < 0 and extra.bias is None and extra.mask is None
    plain = not rule.softcap and not rule.dropout_p and q.dtype in _DTYPES
    return one and seen and plain and library.native_why_not() is None


def forward(q, k, v, extra: Extra, rule: Rule, out, lse) -> None:
    """Write out and lse. Index values are checked before."""
    _forward(q, k, v, extra.block_table, extra.seqlens_k, rule.scale, out, lse)
