"""Finds masks that triton-ascend ignores: it moves the whole tile, then selects.

Such a load reads beyond its mask, and so beyond its tensor. Such a store reads the memory beyond
its mask and writes it back, over values that other programs wrote meanwhile. triton-ascend 3.2
supports masks that compare an index, or an index plus a number, with a number. It ignores masks
with an index minus a number, with constants on both sides of an index, or with a vector of bounds.
"""

from __future__ import annotations

import re

LOAD = "a load reads beyond its mask"
STORE = "a store writes back what lies beyond its mask"
_DEFINED = re.compile(r"\s*(%[\w#]+) = (.*)")
_COPIED = re.compile(r"\s*memref\.copy (%\w+), (%\w+)")
_STORED = re.compile(r"\s*bufferization\.materialize_in_destination (%[\w#]+) in writable (%\w+)")
_SELECTED = re.compile(r"arith\.select (%[\w#]+), (%[\w#]+), (%[\w#]+)")
_LOADED = re.compile(r"bufferization\.to_tensor (%\w+)")


def unread(lowered: str) -> list[str]:
    """Return a phrase for each load and store whose mask is ignored; `lowered` is from
    `vendor.lower`."""
    lines = lowered.splitlines()
    defined = dict(found.groups() for line in lines if (found := _DEFINED.match(line)))
    copied = {found[2]: found[1] for line in lines if (found := _COPIED.match(line))}

    def whole_tile(value: str) -> str | None:
        """Return the tile in global memory that a value was loaded from; None for a part of one."""
        found = _LOADED.match(defined.get(value, ""))
        tile = copied.get(found[1]) if found else None
        return tile if tile and "reinterpret_cast" in defined.get(tile, "") else None

    phrases = []
    for definition in defined.values():
        found = _SELECTED.match(definition)
        if found and whole_tile(found[2]) and not whole_tile(found[3]):
            phrases.append(LOAD)
    for line in lines:
        stored = _STORED.match(line)
        selected = stored and _SELECTED.match(defined.get(stored[1], ""))
        if selected and stored[2] in map(whole_tile, selected.groups()):
            phrases.append(STORE)
    return phrases
