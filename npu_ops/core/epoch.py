"""A counter that invalidates cached dispatch decisions.

The counter grows when a change affects which implementation is chosen: of settings (env.py), of the
assumed device or SoC (`as_if_on`, `as_if_soc`), or of preference tables. `core/decisions.py` makes
the counter part of every cache key.
"""

from __future__ import annotations

_number = 0


def advance() -> None:
    """Invalidate all cached decisions."""
    global _number
    _number += 1


def number() -> int:
    return _number
