"""The score that both mutation testers print, for Python and for AscendC kernels."""

from __future__ import annotations

import collections

CAUGHT = ("check", "result", "warning", "crash", "no end")


def summary(count: collections.Counter) -> str:
    """Return a text: how many mutants were caught, and how many have each verdict."""
    caught = sum(count[verdict] for verdict in CAUGHT)
    tried = sum(count.values()) - count["does not compile"]
    share = f"{100 * caught / tried:.1f} %" if tried else "none"
    kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(count.items()))
    return f"{caught} of {tried} caught ({share}): {kinds}"
