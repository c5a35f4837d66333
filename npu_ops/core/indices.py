"""Checks index values in host memory: sequence starts, positions, slots and lengths.

Public functions check index values among their arguments, but a compiled call skips these checks.
So operators and CPU implementations in Python check again. Native kernels make the same checks with
the same messages (csrc/common/indices.h).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def starts_of(name: str, x: torch.Tensor, tokens: int) -> list[int]:
    """Return the sequence starts as a list, see lengths.py.

    Raises:
        ValueError: the starts do not begin with 0, they decrease, or the last exceeds `tokens`.
    """
    starts = x.tolist()
    if not starts or starts[0] != 0 or starts[-1] > tokens:
        ends = f"{starts[0]} first and {starts[-1]} last" if starts else "no elements"
        raise ValueError(f"{name}: got {ends}, needs 0 and up to {tokens}, the number of tokens")
    if any(after < before for before, after in zip(starts, starts[1:], strict=False)):
        raise ValueError(f"{name}: got a negative length, needs starts that do not decrease")
    return starts


def within(name: str, x: torch.Tensor, low: int, high: int) -> list:
    """Return the values as a list. Raises ValueError unless all are in low..high, inclusive."""
    check_within(name, x, low, high)
    return x.tolist()


def check_within(name: str, x: torch.Tensor | None, low: int, high: int) -> None:
    """Raise ValueError unless all values are in low..high, inclusive. None passes."""
    if x is None or not x.numel():
        return
    smallest, largest = int(x.min()), int(x.max())  # min and max do not copy a view
    if smallest < low or high < largest:
        raise ValueError(f"{name}: got {smallest} to {largest}, needs {low} to {high}")


def check_starts(name: str, x: torch.Tensor | None, tokens: int) -> None:
    """Raise ValueError unless starts are valid, as in `starts_of`. None passes."""
    if x is not None:
        starts_of(name, x, tokens)


def check_distinct(name: str, places: Iterable[int]) -> None:
    """Raise ValueError if an index occurs twice, e.g. a slot that two sequences would write to."""
    seen = set()
    for place in places:
        if place in seen:
            raise ValueError(f"{name}: got {place} twice, needs each at most once")
        seen.add(place)
