"""What mutants.py of Python and of AscendC kernels count alike."""

from __future__ import annotations

import collections

CAUGHT = ("check", "result", "warning", "crash", "no end")


def summary(count: collections.Counter) -> str:
    """How many mutants are caught, and by what."""
    caught = sum(count[verdict] for verdict in CAUGHT)
    tried = sum(count.values()) - count["does not compile"]
    share = f"{100 * caught / tried:.1f} %" if tried else "none"
    kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(count.items()))
    return f"{caught} of {tried} caught ({share}): {kinds}"
