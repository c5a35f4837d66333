"""Halves tiles when an older compiler runs out of unified buffer.

Tile sizes are chosen for the newest ascendnpu-ir. An older one needs more on-chip memory and
rejects a kernel with "ub overflow". Only this error tells npu-ops that the compiler is older.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from npu_ops.core import log

MOST_HALVINGS = 2
rooms: dict[str, Room] = {}


class Room:
    """How often the tiles of one op have been halved in this process."""

    def __init__(self, op: str):
        self.op, self.halvings = op, 0
        rooms[op] = self

    def of(self, size: int) -> int:
        """Return `size`, halved as often as this op's tiles have been halved so far."""
        return size >> self.halvings

    def found_for(self, function: Callable) -> Callable:
        """Wrap a function that launches kernels: on "ub overflow", retry it with smaller tiles."""

        @functools.wraps(function)
        def with_room(*args, **kwargs):
            while True:
                try:
                    return function(*args, **kwargs)
                except Exception as error:
                    if not self.halve(str(error)):
                        raise

        return with_room

    def halve(self, complaint: str) -> bool:
        """Halve the tiles if `complaint` is a "ub overflow". Return False if not, or at the
        limit."""
        if "ub overflow" not in complaint or self.halvings == MOST_HALVINGS:
            return False
        self.halvings += 1
        log.once(
            f"{self.op}: this compiler does not fit the tiles into on-chip memory, a newer one "
            f"does; in this process tiles are {1 << self.halvings} times smaller"
        )
        return True
