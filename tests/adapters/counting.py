"""The calls that reach npu_ops: the adapters look its operators up in it at each call."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable
from types import ModuleType


def on_calls(
    names: Iterable[str], note: Callable[[str], None], home: ModuleType | None = None
) -> None:
    """From now on `note(name)` comes before each call of these operators of npu_ops, or `home`."""
    if home is None:
        import npu_ops as home  # no earlier: checks depend on who is imported first
    for name in names:
        setattr(home, name, _noted(getattr(home, name), functools.partial(note, name)))


def count_calls(names: Iterable[str]) -> collections.Counter[str]:
    """From now on, how often each operator has been called."""
    calls = collections.Counter()
    on_calls(names, lambda name: calls.update([name]))
    return calls


def _noted(operator: Callable, note: Callable[[], None]) -> Callable:
    @functools.wraps(operator)
    def call(*args, **kwargs):
        note()
        return operator(*args, **kwargs)

    return call
