"""Index values that an implementation in Python follows into host memory.

Native kernels do the same with the same words (csrc/common/indices.h). It is done where the values
are followed, for a compiled caller has had no other check.
"""

from __future__ import annotations

from collections.abc import Iterable

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


def within(name: str, x: torch.Tensor, low: int, high: int) -> list:
    """The values. Raises ValueError unless all are from `low` to `high`."""
    check_within(name, x, low, high)
    return x.tolist()


def check_within(name: str, x: torch.Tensor | None, low: int, high: int) -> None:
    """Raise ValueError unless all values are from `low` to `high`."""
    if x is None or not x.numel():
        return
    smallest, largest = (int(value) for value in x.aminmax())
    if smallest < low or high < largest:
        raise ValueError(f"{name}: got {smallest} to {largest}, needs {low} to {high}")


def check_starts(name: str, x: torch.Tensor | None, tokens: int, *, padded: bool = False) -> None:
    """`starts_of`, of starts that may be None."""
    if x is not None:
        starts_of(name, x, tokens, padded=padded)


def check_distinct(name: str, places: Iterable[int]) -> None:
    """Raise ValueError if two sequences would write to one place."""
    seen = set()
    for place in places:
        if place in seen:
            raise ValueError(f"{name}: got {place} twice, needs each at most once")
        seen.add(place)
