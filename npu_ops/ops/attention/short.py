"""Attention of short sequences on the CPU, by native code.

It is faster than torch's flash attention, which is made for long sequences. Its result need not be
checked for a NaN that a mask has hidden.
"""

from __future__ import annotations

import operator

import torch

from npu_ops.core import library
from npu_ops.core.registry import from_native
from npu_ops.ops.attention.arguments import Extra, Rule, last_seen

# Tokens, measured with 4 to 32 heads of 72 to 256. If a query sees all keys, all are multiplied and
# torch catches up sooner. For few queries, torch reads keys in fewer steps.
LONGEST, LONGEST_SEEN = 512, 128
_KEYS_OF_A_QUERY = 8
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NO_EXTRA = Extra()
_forward = from_native(
    "attention_short_cpu(Tensor q, Tensor k, Tensor v, float scale, int shift, Tensor(a!) out, "
    "Tensor(b!) lse) -> ()"
)()
_backward = from_native(
    "attention_short_backward_cpu(Tensor grad_out, Tensor lse, Tensor q, Tensor k, "
    "Tensor v, float scale, int shift, Tensor(a!) grad_q, Tensor(b!) grad_k, Tensor(c!) grad_v) "
    "-> ()"
)()


def serves(q, k, mask, rule: Rule, *gradients) -> bool:
    """Return whether the native code supports these dense tensors in normal form.

    That needs no mask of pairs, queries that see all keys up to a last one, and few tokens. The
    gradients must have contiguous rows.
    """
    queries, keys = q.shape[2], k.shape[2]
    longest = LONGEST_SEEN if rule.window_right < 0 else LONGEST
    few = max(queries, keys) <= longest and keys <= _KEYS_OF_A_QUERY * queries
    asked = mask is None and rule.window_left < 0 and q.dtype in _DTYPES
    dense = all(x.stride(3) == 1 for x in gradients)
    return few and asked and dense and library.native_why_not() is None


def serves_all(q, k, v, extra: Extra, rule: Rule, *gradients) -> bool:
    """Whether the native kernel supports a call without changes: dense, without extra tensors."""
    # Not ==, which compares tensors: that takes as long as a short sequence.
    plain = all(map(operator.is_, extra, _NO_EXTRA)) and not rule.softcap and not rule.dropout_p
    return plain and q.shape[3] == v.shape[3] and serves(q, k, None, rule, *gradients)


def forward(q, k, v, rule: Rule, out, lse) -> None:
    """Write out and lse."""
    _forward(*_given(q, k, v, rule), out, lse)


def backward(grad_out, lse, q, k, v, rule: Rule, grad_q, grad_k, grad_v) -> None:
    """Write the gradients."""
    _backward(grad_out, lse, *_given(q, k, v, rule), grad_q, grad_k, grad_v)


def _given(q, k, v, rule: Rule) -> tuple:
    return q, k, v, rule.scale, last_seen(q, k, rule)
