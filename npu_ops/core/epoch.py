"""A counter that invalidates cached dispatch decisions.

It grows when switches, assumed devices or preference tables change, for they affect which
implementation is chosen. `core/decisions.py` makes it part of every cache key.
"""

from __future__ import annotations

_number = 0


def advance() -> None:
    """Invalidate all cached decisions."""
    global _number
    _number += 1


def number() -> int:
    return _number
