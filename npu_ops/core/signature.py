"""NamedTuples of a public function's arguments, so that its signature is written once."""

from __future__ import annotations

import collections
import inspect
from collections.abc import Callable


def call_of(function: Callable) -> type:
    """Return a NamedTuple type with the parameters and defaults of `function`.

    Unlike the function, the type takes keyword-only arguments by position, too.
    """
    parameters = inspect.signature(function).parameters
    defaults = [p.default for p in parameters.values() if p.default is not p.empty]
    return collections.namedtuple("Call", parameters, defaults=defaults)
