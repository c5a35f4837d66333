"""Attention with one query per sequence on the CPU. The native kernel reads paged keys in place.

Such a call is a decoding step. torch's flash attention cannot read a paged cache: each sequence's
keys would have to be gathered first. With NPU_OPS_CONSISTENT each query of a prompt is computed as
a decoding step, too, to get the same bits.
"""

from __future__ import annotations

import torch

from npu_ops.core import library
from npu_ops.core.registry import from_native
from npu_ops.ops.attention.arguments import Extra, Rule, last_seen

_MASKED = 256  # queries per call in `forward_masked`: bounds the memory for their lists of keys
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_forward = from_native(
    "attention_decode_cpu(Tensor q, Tensor k, Tensor v, Tensor? block_table, Tensor seqlens_k, "
    "float scale, Tensor(a!) out, Tensor(b!) lse) -> ()"
)()


def serves(q, extra: Extra, rule: Rule) -> bool:
    """Return whether the native kernel supports the call as it is.

    That needs one query per sequence, which attends to all keys.
    """
    one = q.shape[2] == 1 and extra.cu_seqlens_q is None and extra.seqlens_k is not None
    last = rule.window_right < 0 or (rule.window_right == 0 and rule.bottom_right)
    return one and last and serves_each(q, extra, rule)


def serves_each(q, extra: Extra, rule: Rule) -> bool:
    """Return whether the native kernel supports each query as a decoding step.

    That needs queries that attend to all keys up to a last one.
    """
    seen = rule.window_left < 0 and extra.bias is None and extra.mask is None
    plain = not rule.softcap and not rule.dropout_p and q.dtype in _DTYPES
    return seen and plain and library.native_why_not() is None


def serves_masked(q, extra: Extra, rule: Rule) -> bool:
    """Return whether the native kernel supports each query as a decoding step over the keys that
    its mask selects."""
    one_for_all_heads = extra.mask is not None and extra.mask.shape[1] == 1
    whole = extra.seqlens_k is None and rule.window_right < 0
    return one_for_all_heads and whole and serves_each(q, extra._replace(mask=None), rule)


def forward(q, k, v, extra: Extra, rule: Rule, out, lse) -> None:
    """Write `out` and `lse`. Index values must be checked before."""
    _forward(q, k, v, extra.block_table, extra.seqlens_k, rule.scale, out, lse)


def forward_each(q, k, v, rule: Rule, out, lse) -> None:
    """Write `out` and `lse` of dense sequences, each query computed as in a decoding step."""
    queries, keys = q.shape[2], k.shape[2]
    seen = torch.arange(1, queries + 1, dtype=torch.int64, device=q.device) + last_seen(q, k, rule)
    seen.clamp_(0, keys)
    for b in range(q.shape[0]):
        own_q, own_out = (x[b].transpose(0, 1).unsqueeze(2) for x in (q, out))
        own_k, own_v = (x[b].expand(queries, -1, -1, -1) for x in (k, v))
        own_lse = lse[b].t().unsqueeze(2)
        _forward(own_q, own_k, own_v, None, seen, rule.scale, own_out, own_lse)


def forward_masked(q, k, v, mask, rule: Rule, out, lse) -> None:
    """Write `out` and `lse`. Each query is a decoding step over the keys that its mask selects."""
    queries, keys = q.shape[2], k.shape[2]
    for b, seen in enumerate(mask[:, 0].expand(q.shape[0], queries, keys)):
        cache = [x[b].transpose(0, 1).unsqueeze(2) for x in (k, v)]  # a block for each key
        for first in range(0, queries, _MASKED):
            own = slice(first, first + _MASKED)
            counts = seen[own].sum(1)
            # List the keys of each query in order: the sum then has the order of an unmasked call.
            table = seen[own].logical_not().byte().argsort(dim=1, stable=True)
            table = table[:, : int(counts.max())].to(torch.int32)
            own_q, own_out = (x[b, :, own].transpose(0, 1).unsqueeze(2) for x in (q, out))
            own_lse = lse[b, :, own].t().unsqueeze(2)
            _forward(own_q, *cache, table, counts, rule.scale, own_out, own_lse)
