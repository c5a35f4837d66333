"""Tiles that are halved where a compiler finds no room for them.

Tiles are planned for the newest ascendnpu-ir. An older one keeps more on the chip, and which one
an image's CANN has is not known before it refuses a kernel: "ub overflow".
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from npu_ops.core import log

MOST_HALVINGS = 2
rooms: dict[str, Room] = {}


class Room:
    """How often the tiles of an op have been halved in this process."""

    def __init__(self, op: str):
        self.op, self.halvings = op, 0
        rooms[op] = self

    def of(self, size: int) -> int:
        """What is left of a size that a tile was planned with."""
        return size >> self.halvings

    def found_for(self, function: Callable) -> Callable:
        """Call a function that launches kernels again with smaller tiles, until they compile."""

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
        """Whether that is what a compiler complains of, and tiles were not the smallest."""
        if "ub overflow" not in complaint or self.halvings == MOST_HALVINGS:
            return False
        self.halvings += 1
        log.once(
            f"{self.op}: this compiler finds no room on the chip for its tiles, which a newer one "
            f"does: they are {1 << self.halvings} times smaller in this process"
        )
        return True
