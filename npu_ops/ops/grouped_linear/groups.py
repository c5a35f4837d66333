"""Finds where groups of rows begin and end, and overwrites the rows that are in no group."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from npu_ops.core import indices, make


def check(arguments) -> None:
    """Raise ValueError for offs in host memory that decrease or end beyond the rows."""
    offs = torch.nn.functional.pad(arguments.offs, (1, 0))
    indices.check_starts("offs", offs, arguments.x.shape[0])


def clamped(offs: torch.Tensor, rows: int) -> torch.Tensor:
    """Return offs as int64; change invalid ends so that a kernel stays within the rows."""
    return offs.long().clamp(0, rows).cummax(0).values


def spans(ends: torch.Tensor) -> Iterator[slice]:
    """Yield the rows of each group, from clamped ends. Waits for the device."""
    begin = 0
    for end in ends.tolist():
        yield slice(begin, end)
        begin = end


def finish(offs: torch.Tensor, ends: torch.Tensor, *by_row: torch.Tensor, others=()) -> None:
    """Write 0 to rows after the last group, and NaN to all results if clamping changed offs.

    by_row: results `[T, ...]`. others: results by group.
    """
    wrong = (ends != offs).any()
    for x in by_row:
        if len(ends):
            row = make.counted(x.shape[0], device=x.device)
            x.masked_fill_((row >= ends[-1])[:, None], 0)
        else:
            x.zero_()
    for x in (*by_row, *others):
        x.masked_fill_(wrong, torch.nan)


def nothing_to_add(arguments) -> None:
    """Write the results of a call with an empty x or weight: 0, or NaN if offs are invalid."""
    results = [x for n, x in arguments._asdict().items() if n == "out" or n.startswith("grad_")]
    for x in results:
        x.zero_()
    finish(arguments.offs, clamped(arguments.offs, arguments.x.shape[0]), others=results)
