"""Shared by causal_conv1d's kernels for narrow and wide filters: finds the sequence of a token."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sequence_of(cu_seqlens, sequences, token, STARTS: tl.constexpr):
    """Return the index of a packed token's sequence: the last one that starts at or before it.

    Return 0 if no sequence does; this happens only if the starts are invalid.
    """
    started = 0
    for first in range(0, sequences, STARTS):
        n = first + tl.arange(0, STARTS)
        start = tl.load(cu_seqlens + n, mask=n < sequences, other=2147483647)
        started += tl.sum((start <= token).to(tl.int32), axis=0)
    return tl.maximum(started - 1, 0)


@triton.jit
def bounds_of(cu_seqlens, n, length, PACKED: tl.constexpr):
    """Return a sequence's first token and its end, both clamped to 0..length."""
    if PACKED:
        start = tl.minimum(tl.maximum(tl.load(cu_seqlens + n), 0), length)
        stop = tl.minimum(tl.maximum(tl.load(cu_seqlens + n + 1), start), length)
    else:
        start, stop = 0, length
    return start, stop


@triton.jit
def piece_of(item, cu_seqlens, sequences, length, chunk, blocks, PACKED: tl.constexpr,
           STARTS: tl.constexpr):  # fmt: skip
    """Return a work item's batch element b, tokens [first, last) and sequences [n_first, n_last].

    An item is one of `blocks` blocks of channels of a piece: `chunk` tokens of a batch element.
    """
    chunks = tl.cdiv(length, chunk)
    b = item // blocks // chunks
    first = (item // blocks % chunks) * chunk
    last = tl.minimum(first + chunk, length)
    n_first, n_last = b, b
    if PACKED:
        n_first = _sequence_of(cu_seqlens, sequences, first, STARTS)
        n_last = _sequence_of(cu_seqlens, sequences, last - 1, STARTS)
    return tl.cast(b, tl.int64), first, last, n_first, n_last
