"""Index values that an implementation in Python follows into host memory.

Native kernels do the same with the same words (csrc/common/indices.h). It is done where the values
are followed, for a compiled caller has had no other check.
"""

from __future__ import annotations

import torch


def starts_of(name: str, x: torch.Tensor, tokens: int, *, padded: bool = False) -> list[int]:
    """Where sequences start and the last one ends.

    Raises ValueError unless they span `tokens`, or as many of them as come before padding.
    """
    starts = x.tolist()
    spans = starts and (starts[-1] == tokens or (padded and starts[-1] < tokens))
    if not spans or starts[0] != 0:
        ends = f"{starts[0]} first and {starts[-1]} last" if starts else "no elements"
        most = "up to " if padded else ""
        raise ValueError(f"{name}: got {ends}, needs 0 and {most}{tokens}, the number of tokens")
    if any(after < before for before, after in zip(starts, starts[1:], strict=False)):
        raise ValueError(f"{name}: got a negative length, needs starts that do not decrease")
    return starts


def within(name: str, x: torch.Tensor, low: int, high: int) -> list[int]:
    """The values. Raises ValueError unless all are from `low` to `high`."""
    values = x.tolist()
    if values and not (low <= min(values) and max(values) <= high):
        raise ValueError(f"{name}: got {min(values)} to {max(values)}, needs {low} to {high}")
    return values
