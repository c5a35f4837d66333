"""A number that grows when something changes that implementations are chosen by, besides a call.

Switches, assumed devices and tables of preferences advance it; `core/decisions.py` reads it.
"""

from __future__ import annotations

_number = 0


def advance() -> None:
    """Make decisions of before invalid."""
    global _number
    _number += 1


def number() -> int:
    return _number
