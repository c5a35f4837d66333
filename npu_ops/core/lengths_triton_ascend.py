"""What tokens that belong to nobody have, written behind a kernel in one launch: see lengths.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from npu_ops.core.grid import next_power_of_2, vector_grid

# Starts of sequences looked at in one piece, and elements of a row written in one.
STARTS = 1024
BLOCK = 2048
# Tensors of a launch.
MOST = 5


@triton.jit
def looked_at(starts, sequences, tokens, STARTS: tl.constexpr):
    """Whether int32 starts are right, and where the last sequence ends."""
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
    """The tokens of sequence n; those of nobody are sequence number `sequences`, which has all of
    them where the starts are not `right`."""
    n += 0 * last  # a tensor for Triton's interpreter too, where a loop's counter is Python's
    begin = tl.load(starts + tl.minimum(n, sequences))
    end = tl.load(starts + tl.minimum(n + 1, sequences))
    begin = tl.where(n < sequences, begin, last)
    end = tl.where(n < sequences, end, tokens)
    return tl.where(right, begin, 0), tl.where(right | (n >= sequences), end, 0)


@triton.jit
def _fill(x, first, tokens, heads, width, x_t, x_n, value, BLOCK: tl.constexpr):
    """Tokens [first, tokens) of x, each of `heads` times `width` elements, become `value`."""
    if x is not None:
        filled = (tl.zeros((BLOCK,), tl.float32) + value).to(x.dtype.element_ty)
        for token in range(first + tl.program_id(0), tokens, tl.num_programs(0)):
            for head in range(0, heads):
                row = x + tl.cast(token, tl.int64) * x_t + tl.cast(head, tl.int64) * x_n
                for column in range(0, width, BLOCK):
                    at = column + tl.arange(0, BLOCK)
                    tl.store(row + at, filled, mask=at < width)


@triton.jit(do_not_specialize=["sequences", "tokens"])
def _finish_kernel(
    starts, x0, x1, x2, x3, x4, sequences, tokens, h0, w0, t0, n0, h1, w1, t1, n1, h2, w2, t2, n2,
    h3, w3, t3, n3, h4, w4, t4, n4, STARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    right, last = looked_at(starts, sequences, tokens, STARTS)
    first, _ = span_of(starts, sequences, sequences, tokens, right, last)
    value = tl.where(right, 0.0, float("nan"))
    _fill(x0, first, tokens, h0, w0, t0, n0, value, BLOCK)
    _fill(x1, first, tokens, h1, w1, t1, n1, value, BLOCK)
    _fill(x2, first, tokens, h2, w2, t2, n2, value, BLOCK)
    _fill(x3, first, tokens, h3, w3, t3, n3, value, BLOCK)
    _fill(x4, first, tokens, h4, w4, t4, n4, value, BLOCK)


def finish(starts: torch.Tensor | None, *outputs: torch.Tensor | None) -> None:
    """Write what tokens that belong to nobody have, to outputs `[1, tokens, ...]`.

    starts: int32, one after another, as `int32_starts` gives them; None: nothing to do. Where all
    tokens belong to a sequence, the launch only looks at the starts.
    """
    given = [x for x in outputs if x is not None and x.numel()]
    while starts is not None and given:
        part, given = given[:MOST], given[MOST:]
        absent, tokens = MOST - len(part), part[0].shape[1]
        rows = [_row(x) for x in part]
        block = min(BLOCK, next_power_of_2(max(width for _, width, *_ in rows)))
        _finish_kernel[vector_grid(tokens, part[0].device)](
            starts, *part, *[None] * absent, starts.shape[0] - 1, tokens,
            *(number for row in rows for number in row), *[0] * (4 * absent), STARTS=STARTS,
            BLOCK=block,
        )  # fmt: skip


def _row(x: torch.Tensor) -> tuple[int, int, int, int]:
    """A token's heads and the width of each, and from one token and one head to the next."""
    heads, width = (1, x.shape[2]) if x.dim() == 3 else x.shape[2:]
    apart = x.stride(2)
    if x.dim() == 3 and apart != 1:
        heads, width = width, 1
    elif x.dim() == 4 and apart == width:
        heads, width = 1, heads * width
    return heads, width, x.stride(1), apart


def int32_starts(starts: torch.Tensor | None) -> torch.Tensor | None:
    """int32 one after another, for an NPU compares int64 one by one."""
    return None if starts is None else starts.to(torch.int32).contiguous()
