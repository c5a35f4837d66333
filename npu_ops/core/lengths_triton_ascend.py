"""Overwrites results after an op's kernels: 0 for tokens in no sequence, NaN for invalid starts.

lengths.py defines these results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from npu_ops.core.grid import next_power_of_2, vector_grid

# STARTS: sequence starts checked per step. BLOCK: elements of a row written per step.
STARTS = 1024
BLOCK = 2048
# Maximum number of tensors per launch.
MOST = 5


@triton.jit
def looked_at(starts, sequences, tokens, STARTS: tl.constexpr):
    """Return whether int32 starts are valid, and where the last sequence ends."""
    wrong = 0
    for begin in range(0, sequences, STARTS):
        n = begin + tl.arange(0, STARTS)
        start = tl.load(starts + n, mask=n < sequences, other=0)
        end = tl.load(starts + n + 1, mask=n < sequences, other=0)
        wrong += tl.sum((start > end).to(tl.int32), axis=0)
    last = tl.load(starts + sequences)
    return (wrong == 0) & (tl.load(starts) == 0) & (last <= tokens), last


@triton.jit
def span_of(starts, n, sequences, tokens, right, last):
    """Return the first token of sequence n and the token after its last.

    n == sequences stands for the tokens after the last sequence. If the starts are not `right`,
    it stands for all tokens, and the other sequences are empty.
    """
    n += 0 * last  # makes n a tensor: in Triton's interpreter a loop counter is an int
    begin = tl.load(starts + tl.minimum(n, sequences))
    end = tl.load(starts + tl.minimum(n + 1, sequences))
    begin = tl.where(n < sequences, begin, last)
    end = tl.where(n < sequences, end, tokens)
    return tl.where(right, begin, 0), tl.where(right | (n >= sequences), end, 0)


@triton.jit
def _fill(
    x, right, first, rows, heads, width, x_t, x_n, value, STATE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Fill rows of x with `value`; each row has `heads` times `width` elements.

    For tokens, fill those from `first` on. For states, fill all if starts are invalid, else none.
    """
    if x is not None:
        if STATE:
            first = tl.where(right, rows, 0)
        filled = (tl.zeros((BLOCK,), tl.float32) + value).to(x.dtype.element_ty)
        for n in range(first + tl.program_id(0), rows, tl.num_programs(0)):
            for head in range(0, heads):
                row = x + tl.cast(n, tl.int64) * x_t + tl.cast(head, tl.int64) * x_n
                for column in range(0, width, BLOCK):
                    at = column + tl.arange(0, BLOCK)
                    tl.store(row + at, filled, mask=at < width)


@triton.jit(do_not_specialize=["sequences", "tokens", "r0", "r1", "r2", "r3", "r4"])
def _finish_kernel(
    starts, x0, x1, x2, x3, x4, sequences, tokens, r0, h0, w0, t0, n0, r1, h1, w1, t1, n1, r2, h2,
    w2, t2, n2, r3, h3, w3, t3, n3, r4, h4, w4, t4, n4, STATES: tl.constexpr, STARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Fill up to 5 tensors: the first STATES of them hold tokens, the others hold states."""
    right, last = looked_at(starts, sequences, tokens, STARTS)
    first, _ = span_of(starts, sequences, sequences, tokens, right, last)
    value = tl.where(right, 0.0, float("nan"))
    _fill(x0, right, first, r0, h0, w0, t0, n0, value, STATES <= 0, BLOCK)
    _fill(x1, right, first, r1, h1, w1, t1, n1, value, STATES <= 1, BLOCK)
    _fill(x2, right, first, r2, h2, w2, t2, n2, value, STATES <= 2, BLOCK)
    _fill(x3, right, first, r3, h3, w3, t3, n3, value, STATES <= 3, BLOCK)
    _fill(x4, right, first, r4, h4, w4, t4, n4, value, STATES <= 4, BLOCK)


def finish(starts: torch.Tensor | None, *outputs: torch.Tensor | None, states=()) -> None:
    """Set the results of tokens after the last sequence to 0.

    If starts are invalid, set the results of all tokens, and the states, to NaN.

    starts: contiguous int32, see `int32_starts`; None: do nothing. If every token belongs to a
    sequence, the launch only checks the starts.
    outputs: `[1, tokens, ...]`, or None.
    states: `[N, ...]`, each row contiguous, or None.
    """
    if starts is None:
        return
    tokens = next(x for x in outputs if x is not None).shape[1]
    given = [x for x in outputs if x is not None and x.numel()]
    of_states = [_flat(x) for x in states if x is not None and x.numel()]
    while given or of_states:
        part = (given + of_states)[:MOST]
        first_state, absent = min(len(given), MOST), MOST - len(part)
        given, of_states = given[MOST:], of_states[len(part) - first_state :]
        rows = [_row(x) for x in part]
        block = min(BLOCK, next_power_of_2(max(width for _, _, width, *_ in rows)))
        items = max(count for count, *_ in rows)
        _finish_kernel[vector_grid(items, part[0].device)](
            starts, *part, *[None] * absent, starts.shape[0] - 1, tokens,
            *(number for row in rows for number in row), *[0] * (5 * absent), STATES=first_state,
            STARTS=STARTS, BLOCK=block,
        )  # fmt: skip


def _flat(states: torch.Tensor) -> torch.Tensor:
    """View states as `[1, N, elements]`, each row in memory order."""
    count = states.shape[0]
    return states.as_strided((1, count, states.numel() // count), (0, states.stride(0), 1))


def _row(x: torch.Tensor) -> tuple[int, int, int, int, int]:
    """Return a tensor's rows, heads per row, elements per head, row stride and head stride.

    x: `[1, T, D]` or `[1, T, heads, D]`. Contiguous heads count as one wide head.
    """
    heads, width = (1, x.shape[2]) if x.dim() == 3 else x.shape[2:]
    apart = x.stride(2)
    if x.dim() == 3 and apart != 1:
        heads, width = width, 1
    elif x.dim() == 4 and apart == width:
        heads, width = 1, heads * width
    return x.shape[1], heads, width, x.stride(1), apart


def int32_starts(starts: torch.Tensor | None) -> torch.Tensor | None:
    """Return contiguous int32 starts: an NPU has no vector comparison of int64."""
    return None if starts is None else starts.to(torch.int32).contiguous()
