"""A public function's arguments by name, so that its signature is written once."""

from __future__ import annotations

import collections
import inspect
from collections.abc import Callable


def call_of(function: Callable) -> type:
    """The NamedTuple of a call of `function`: made with the same arguments, with its defaults.

    Unlike the function, it takes keyword-only arguments by position, too.
    """
    parameters = inspect.signature(function).parameters
    defaults = [p.default for p in parameters.values() if p.default is not p.empty]
    return collections.namedtuple("Call", parameters, defaults=defaults)
