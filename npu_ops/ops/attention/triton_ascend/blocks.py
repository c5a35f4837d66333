"""Finds the blocks of tokens on the device, and the pairs of a query block and a key block.

A block of queries is paired with the blocks of keys that its window contains, and the reverse. A
block is a part of one sequence. In dense tensors, each batch entry is a sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from npu_ops.core.grid import cdiv


class Blocks(NamedTuple):
    """The blocks of a tensor's tokens, computed without a device synchronisation.

    number: upper bound of the number of blocks; those beyond the last one have no rows.
    across: blocks per sequence, if all sequences have equally many.
    table: int32 [number, 2]: the sequence of each block, and its index within it; None if that
    follows from `across`.
    """

    number: int
    across: int
    table: torch.Tensor | None


def blocks_of(x, starts, size: int) -> Blocks:
    """Return the blocks of `size` tokens of each sequence of x `[batch, heads, tokens, dim]`.

    starts: the cu_seqlens of packed sequences, else None.
    """
    batch, _, tokens, _ = x.shape
    if starts is None:
        across = cdiv(tokens, size)
        return Blocks(batch * across, across, None)
    sequences = starts.shape[0] - 1
    number = tokens // size + sequences
    counts = (starts.diff() + (size - 1)) // size
    ends = counts.cumsum(0)
    index = torch.arange(number, device=x.device, dtype=ends.dtype)
    sequence = torch.searchsorted(ends, index, right=True).clamp(max=sequences - 1)
    within = index - (ends - counts)[sequence]
    return Blocks(number, 1, torch.stack((sequence, within), 1).int())


@triton.jit
def _within(starts, sequence, tokens):
    """Return a sequence's first token and length, clamped to `tokens` for invalid starts."""
    first = tl.load(starts + sequence).to(tl.int32)
    end = tl.load(starts + sequence + 1).to(tl.int32)
    first = tl.minimum(tl.maximum(first, 0), tokens)
    return first, tl.minimum(tl.maximum(end, first), tokens) - first


@triton.jit
def find(block, table, number, across, starts_q, starts_k, lengths_k, queries, keys):
    """Return where a block is, and the tokens of its sequence.

    Returns: sequence, index of the block in the sequence, batch entry; then first token and number
    of tokens of the sequence's queries, and the same of its keys.
    """
    if table is None:
        sequence, within = block // across, block % across
    else:
        sequence, within = tl.load(table + 2 * block), tl.load(table + 2 * block + 1)
        within = tl.minimum(tl.maximum(within, 0), number)
    batch, first_q, first_k = sequence, 0, 0
    if starts_q is not None:
        batch = 0
        first_q, queries = _within(starts_q, sequence, queries)
    if starts_k is not None:
        first_k, keys = _within(starts_k, sequence, keys)
    if lengths_k is not None:
        keys = tl.minimum(tl.maximum(tl.load(lengths_k + sequence).to(tl.int32), 0), keys)
    return sequence, within, batch, first_q, queries, first_k, keys


@triton.jit
def partners(first, last, behind, ahead, length, SIZE: tl.constexpr, BEHIND: tl.constexpr,
             AHEAD: tl.constexpr, WHOLE: tl.constexpr = True):  # fmt: skip
    """Return the blocks of the other side (keys or queries) that tokens first..last pair with.

    Token x pairs with tokens x - behind (if BEHIND) to x + ahead (if AHEAD), out of `length`.
    Returns begin, whole, split, end: the blocks are begin..end, and those in whole..split need no
    mask. Unless WHOLE, whole..split is empty.
    """
    low, high, inner_low, inner_high = 0, length, 0, length
    if BEHIND:
        low = tl.maximum(first - behind, 0)
        inner_low = tl.maximum(last - behind, 0)
    if AHEAD:
        high = tl.maximum(tl.minimum(last + ahead + 1, length), 0)
        inner_high = tl.maximum(tl.minimum(first + ahead + 1, length), 0)
    begin = low // SIZE
    end = tl.maximum((high + SIZE - 1) // SIZE, begin)
    whole, split = begin, begin
    if WHOLE:
        whole = tl.minimum((inner_low + SIZE - 1) // SIZE, end)
        split = tl.maximum(tl.minimum(inner_high // SIZE, end), whole)
    return begin, whole, split, end


@triton.jit
def edge_block(index, whole, split):
    """Return the number of the `index`-th block that needs a mask, counted from `begin`."""
    return tl.where(index < whole, index, index + (split - whole))
