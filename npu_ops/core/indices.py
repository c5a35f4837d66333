"""Index values that an implementation in Python follows into host memory.

Native kernels do the same with the same words (csrc/common/indices.h). It is done where the values
are followed, for a compiled caller has had no other check.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def starts_of(name: str, x: torch.Tensor, tokens: int) -> list[int]:
    """Where sequences start and the last one ends, see lengths.py.

    Raises ValueError unless they begin with 0, do not decrease, and end among `tokens`.
    """
    starts = x.tolist()
    if not starts or starts[0] != 0 or starts[-1] > tokens:
        ends = f"{starts[0]} first and {starts[-1]} last" if starts else "no elements"
        raise ValueError(f"{name}: got {ends}, needs 0 and up to {tokens}, the number of tokens")
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
    smallest, largest = int(x.min()), int(x.max())  # which copy no view
    if smallest < low or high < largest:
        raise ValueError(f"{name}: got {smallest} to {largest}, needs {low} to {high}")


def check_starts(name: str, x: torch.Tensor | None, tokens: int) -> None:
    """`starts_of`, of starts that may be None."""
    if x is not None:
        starts_of(name, x, tokens)


def check_distinct(name: str, places: Iterable[int]) -> None:
    """Raise ValueError if two sequences would write to one place."""
    seen = set()
    for place in places:
        if place in seen:
            raise ValueError(f"{name}: got {place} twice, needs each at most once")
        seen.add(place)
