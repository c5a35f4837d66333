"""Shared by chunk_gated_delta_rule and chunk_kda: finds the chunks of sequences on the device.

This file also lays out gates and betas by chunk, and their gradients by token. Gates come as
[tokens, heads], but the kernels need the tokens of one head to be contiguous within a chunk. So one
kernel writes them as [chunks, heads, C], and computes the cumulative sums of g at the same time.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from npu_ops.core.grid import cdiv, next_power_of_2, vector_grid

# Minimum columns with which the vendor's compiler vectorises a cumulative sum along tokens.
NARROWEST = 8
# Block sizes: chunks (sequences of one length), chunks (packed), entries of cu_seqlens per load.
INDICES, SEARCHED, SEQUENCES = 256, 64, 32


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Positions of the chunks of all sequences, computed without a device synchronisation.

    number: an upper bound of the number of chunks. Chunks beyond the last have no rows.
    spans: int32 [number, 2]: the first row of each chunk and its number of rows.
    starts: int32 [sequences + 1]: the first row of each sequence, and the end.
    firsts: int32 [sequences]: the first chunk of each sequence.
    """

    number: int
    sequences: int
    spans: torch.Tensor
    starts: torch.Tensor
    firsts: torch.Tensor

    @classmethod
    def empty(cls, number: int, sequences: int, device) -> Chunks:
        """Return uninitialised tensors for a kernel to fill."""
        shapes = (number, 2), (sequences + 1,), (sequences,)
        index = (torch.empty(shape, device=device, dtype=torch.int32) for shape in shapes)
        return cls(number, sequences, *index)


def chunks_of(q, cu_seqlens, size: int) -> Chunks:
    """Return the chunks of q's sequences."""
    batch, length = q.shape[:2]
    if cu_seqlens is None:
        return _of_one_length(batch, length, size, q.device)
    sequences = cu_seqlens.shape[0] - 1
    number = length // size + sequences
    found = Chunks.empty(number, sequences, q.device)
    _packed_kernel[vector_grid(cdiv(max(number, 1), SEARCHED), q.device)](
        cu_seqlens.int(), found.spans, found.starts, found.firsts, sequences, length, number,
        C=size, BLOCK=SEARCHED, S=SEQUENCES,
    )  # fmt: skip
    return found


def _of_one_length(batch: int, length: int, size: int, device) -> Chunks:
    """Return the chunks of sequences of the same length, in one launch."""
    each = cdiv(length, size)
    found = Chunks.empty(batch * each, batch, device)
    numbers = max(batch * each, batch + 1)
    _one_length_kernel[vector_grid(cdiv(numbers, INDICES), device)](
        found.spans, found.starts, found.firsts, batch, length, each, numbers,
        C=size, BLOCK=INDICES,
    )  # fmt: skip
    return found


@triton.jit
def _store_spans(spans, index, first, rows, number):
    """Write a chunk's first row and number of rows side by side, where index < number."""
    is_first = (tl.arange(0, 2) == 0)[None, :]
    both = tl.where(is_first, first[:, None], rows[:, None]).to(tl.int32)
    at = 2 * index[:, None] + tl.arange(0, 2)[None, :]
    tl.store(spans + at, both, mask=(index < number)[:, None])


@triton.jit(do_not_specialize=["batch", "length", "each", "numbers"])
def _one_length_kernel(spans, starts, firsts, batch, length, each, numbers, C: tl.constexpr,
                       BLOCK: tl.constexpr):  # fmt: skip
    """Fill `Chunks.spans`, `starts` and `firsts` for sequences of one length.

    each: chunks of a sequence. numbers: length of the longest of the three tensors.
    """
    for begin in range(tl.program_id(0) * BLOCK, numbers, tl.num_programs(0) * BLOCK):
        index = begin + tl.arange(0, BLOCK)
        tl.store(starts + index, index * length, mask=index <= batch)
        tl.store(firsts + index, index * each, mask=index < batch)
        # Vector cores divide only floats. fp32 is exact here, as there are fewer than 2^22 chunks.
        n = ((index.to(tl.float32) + 0.5) / each).to(tl.int32)
        before = (index - n * each) * C
        rows = tl.minimum(length - before, C)
        _store_spans(spans, index, n * length + before, rows, batch * each)


@triton.jit(do_not_specialize=["sequences", "length", "number"])
def _packed_kernel(cu_seqlens, spans, starts, firsts, sequences, length, number, C: tl.constexpr,
                   BLOCK: tl.constexpr, S: tl.constexpr):  # fmt: skip
    """Fill `Chunks.spans`, `starts` and `firsts` for packed sequences.

    Each program reads all lengths, and finds the sequence of each of its chunks by comparisons.

    cu_seqlens was not checked. It is clamped to the tokens and made non-decreasing, so that every
    access is in bounds; `finish` overwrites the results of invalid lengths with NaN. Vector cores
    compare and divide only floats. fp32 is exact here: `triton_why_not` rejects 2^22 and more
    tokens.
    """
    row, of_tile = tl.arange(0, BLOCK), tl.arange(0, S)
    is_before = of_tile[None, :] <= of_tile[:, None]
    for begin in range(tl.program_id(0) * BLOCK, tl.maximum(number, 1), tl.num_programs(0) * BLOCK):
        index = (begin + row).to(tl.float32)
        start = tl.zeros((BLOCK,), tl.float32)
        stop, first = start, start
        reached, chunks = 0.0, 0.0
        for n in range(0, sequences + 1, S):
            at = n + of_tile
            left = tl.load(cu_seqlens + at, mask=at <= sequences, other=0).to(tl.float32)
            right = tl.load(cu_seqlens + at + 1, mask=at < sequences, other=0).to(tl.float32)
            left = tl.minimum(tl.maximum(left, reached), length)
            left = tl.max(tl.where(is_before, left[None, :], 0.0), 1)
            right = tl.maximum(tl.minimum(right, length), left)
            counts = ((right - left + (C - 0.5)) / C).to(tl.int32).to(tl.float32)
            ends = chunks + tl.sum(tl.where(is_before, counts[None, :], 0.0), 1)
            if begin == 0:
                tl.store(starts + at, left.to(tl.int32), mask=at <= sequences)
                tl.store(firsts + at, (ends - counts).to(tl.int32), mask=at < sequences)
            # Starts, stops and first chunks are non-decreasing: the maximum over the sequences that
            # begin at or before a chunk is the value of the sequence that holds it.
            begins = (ends - counts)[None, :] <= index[:, None]
            start = tl.maximum(start, tl.max(tl.where(begins, left[None, :], 0.0), 1))
            stop = tl.maximum(stop, tl.max(tl.where(begins, right[None, :], 0.0), 1))
            first = tl.maximum(first, tl.max(tl.where(begins, (ends - counts)[None, :], 0.0), 1))
            reached = tl.max(right, 0)
            chunks = tl.max(ends, 0)
        before = (index - first) * C
        rows = tl.minimum(tl.maximum(stop - start - before, 0.0), C)
        _store_spans(spans, begin + row, start + before, rows, number)


@triton.jit(do_not_specialize=["number"])
def _gather_kernel(g, beta, spans, g_sums, betas, number, HV: tl.constexpr, BH: tl.constexpr,
                   C: tl.constexpr):  # fmt: skip
    """Lay out g and beta by chunk: [tokens, HV] -> [chunks, HV, C]. g is summed within its chunk.

    Rows beyond a chunk's end neither decay nor write.
    """
    row, head = tl.arange(0, C), tl.arange(0, BH)
    for chunk in range(tl.program_id(0), number, tl.num_programs(0)):
        first, rows = tl.load(spans + 2 * chunk), tl.load(spans + 2 * chunk + 1)
        at = (first + row).to(tl.int64)[:, None] * HV + head[None, :]
        mask = (row < rows)[:, None] & (head < HV)[None, :]
        to = tl.cast(chunk, tl.int64) * (HV * C) + head[:, None] * C + row[None, :]
        exists = (head < HV)[:, None] & (row < C)[None, :]
        if g is not None:
            # A decay of exp(-63) = 4e-28 is as good as 0. A lower gate would only cost precision in
            # the sums, whose differences are the decays of later tokens.
            sums = tl.cumsum(tl.maximum(tl.load(g + at, mask=mask, other=0.0), -63.0), 0)
            tl.store(g_sums + to, tl.trans(sums), mask=exists)
        tl.store(betas + to, tl.trans(tl.load(beta + at, mask=mask, other=0.0)), mask=exists)


@triton.jit(do_not_specialize=["number"])
def _scatter_kernel(grad_g_sums, kept_sums, totals, grad_betas, spans, grad_g, grad_beta, number,
                    HV: tl.constexpr, BH: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Compute the gradients by token from the gradients by chunk: the reverse of `_gather_kernel`.

    A gate acts on:

    - its own token and later tokens of the chunk (grad_g_sums),
    - what earlier tokens of the chunk leave in the state (kept_sums),
    - the state before the chunk (totals).
    """
    row, head = tl.arange(0, C), tl.arange(0, BH)
    for chunk in range(tl.program_id(0), number, tl.num_programs(0)):
        first, rows = tl.load(spans + 2 * chunk), tl.load(spans + 2 * chunk + 1)
        at = (first + row).to(tl.int64)[:, None] * HV + head[None, :]
        mask = (row < rows)[:, None] & (head < HV)[None, :]
        place = tl.cast(chunk, tl.int64) * (HV * C) + head[:, None] * C + row[None, :]
        exists = (head < HV)[:, None] & (row < C)[None, :]
        if grad_g is not None:
            own = tl.trans(tl.load(grad_g_sums + place, mask=exists, other=0.0))
            kept = tl.trans(tl.load(kept_sums + place, mask=exists, other=0.0))
            whole = tl.load(
                totals + tl.cast(chunk, tl.int64) * HV + head, mask=head < HV, other=0.0
            )
            whole += tl.sum(own, 0)
            b_grad_g = own - kept - tl.cumsum(own - kept, 0) + whole[None, :]
            tl.store(grad_g + at, b_grad_g, mask=mask)
        b_grad_beta = tl.trans(tl.load(grad_betas + place, mask=exists, other=0.0))
        tl.store(grad_beta + at, b_grad_beta, mask=mask)


def gather(g, beta, chunks: Chunks, size: int):
    """Return g's cumulative sums in each chunk (None without g), and beta; fp32 [chunks, HV, C]."""
    heads = beta.shape[-1]
    betas = beta.new_empty((chunks.number, heads, size))
    sums = None if g is None else torch.empty_like(betas)
    _launch(_gather_kernel, (g, beta, chunks.spans, sums, betas), chunks, heads, size)
    return sums, betas


def summed(parts):
    """Return the sum of `parts` over their first dimension, one part from each block."""
    return parts[0] if parts.shape[0] == 1 else parts.sum(0)


def scatter(grad_g_sums, kept_sums, totals, grad_betas, chunks: Chunks, grad_g, grad_beta) -> None:
    """Write the gradients of g and beta, fp32 [tokens, HV], from the gradients by chunk.

    grad_g: None if g was None; then the first three arguments are also None.
    """
    tensors = grad_g_sums, kept_sums, totals, grad_betas, chunks.spans, grad_g, grad_beta
    _launch(_scatter_kernel, tensors, chunks, *grad_betas.shape[1:])


def _launch(kernel, tensors, chunks: Chunks, heads: int, size: int) -> None:
    width = max(NARROWEST, next_power_of_2(heads))
    grid = vector_grid(chunks.number, chunks.spans.device)
    kernel[grid](*tensors, chunks.number, HV=heads, BH=width, C=size)
