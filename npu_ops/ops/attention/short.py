"""Attention of short sequences on the CPU, by native code.

It is faster than torch's flash attention, which is made for long sequences. It reads no masked
element, so its results need no check for NaNs, unlike those of flash attention (cpu.py).
"""

from __future__ import annotations

import operator

import torch

from npu_ops.core import library
from npu_ops.core.registry import from_native
from npu_ops.ops.attention.arguments import Extra, Rule, last_seen

# Up to LONGEST tokens, native code is faster than torch's flash attention, measured with 4 to 32
# heads of head_dim 72 to 256. LONGEST_SEEN is the limit if queries attend to all keys: then no
# product can be skipped. With more than _KEYS_OF_A_QUERY keys per query torch is faster: it reads
# more keys at a time than native code does.
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

    Each query must attend to all keys, or to all keys up to a last one (causal, with any offset).
    Tokens must be few, and the rows of gradients contiguous.
    """
    queries, keys = q.shape[2], k.shape[2]
    longest = LONGEST_SEEN if rule.window_right < 0 else LONGEST
    few = max(queries, keys) <= longest and keys <= _KEYS_OF_A_QUERY * queries
    asked = mask is None and rule.window_left < 0 and q.dtype in _DTYPES
    dense = all(x.stride(3) == 1 for x in gradients)
    return few and asked and dense and library.native_why_not() is None


def serves_all(q, k, v, extra: Extra, rule: Rule, *gradients) -> bool:
    """Return whether the native kernel supports a call as it is: dense, without extra tensors."""
    # Compare by identity: == would compare tensors, which takes as long as a short sequence.
    plain = all(map(operator.is_, extra, _NO_EXTRA)) and not rule.softcap and not rule.dropout_p
    return plain and q.shape[3] == v.shape[3] and serves(q, k, None, rule, *gradients)


def forward(q, k, v, rule: Rule, out, lse) -> None:
    """Write `out` and `lse`."""
    _forward(*_given(q, k, v, rule), out, lse)


def backward(grad_out, lse, q, k, v, rule: Rule, grad_q, grad_k, grad_v) -> None:
    """Write the gradients."""
    _backward(grad_out, lse, *_given(q, k, v, rule), grad_q, grad_k, grad_v)


def _given(q, k, v, rule: Rule) -> tuple:
    return q, k, v, rule.scale, last_seen(q, k, rule)
