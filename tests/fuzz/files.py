"""Preference files (written by `npu-ops tune`) for the fuzzer: valid tables, tables with an error,
and other content.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import tempfile

from fuzz.target import DTYPES
from npu_ops.core import preferences
from npu_ops.core.registry import Table

# Values that are invalid in every field of a row.
JUNK = (None, -1, 1.5, [], {}, True, 10**30, "load", "", float("inf"), "x" * 1000)
CHECKED = ("op", "dtype", "implementation", "width", "bits")


class Taken(Exception):
    """A valid preferences file was refused, an invalid one accepted, or the message was wrong."""


def rows(draw: random.Random) -> list[dict]:
    """Return rows that choose an implementation of each op for every class of small calls."""
    return [
        {"op": op, "dtype": dtype, "width": width, "bits": bits, "us": draw.random(),
         "implementation": draw.choice(table.implementations).name}
        for op, table in sorted(Table.tables.items())
        for dtype in DTYPES for width in range(1, 10) for bits in (3, 9)
    ]  # fmt: skip


def write(path: pathlib.Path, draw: random.Random) -> bool | None:
    """Write the file. Return whether it is a valid table; None if that is unknown."""
    kind = draw.choice(("table", "table", "field", "bytes", "end", "nested", "pipe", "folder"))
    table = {"format": preferences.FORMAT, "rows": rows(draw)}
    if kind == "field":
        table["rows"][draw.randrange(len(table["rows"]))][draw.choice(CHECKED)] = draw.choice(JUNK)
    text = bytearray(json.dumps(table).encode())
    match kind:
        case "bytes":
            for _ in range(draw.randint(1, 3)):
                text[draw.randrange(len(text))] = draw.randrange(256)
        case "end":
            del text[draw.randrange(len(text)) :]
        case "nested":
            text[:] = b'{"rows":' * draw.randint(1, 50_000) + text
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
    if kind not in ("pipe", "folder"):
        path.write_bytes(text)
    return {"table": True, "bytes": None}.get(kind, False)


@contextlib.contextmanager
def in_force(seed: int):
    """Use a random preferences file within the block; yields whether calls use it.

    Raises:
        Taken: a valid file is refused, or an invalid one is not refused by a message that says what
            to remove.
    """
    before = preferences.cache
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / preferences.file_name(preferences.soc_of("cpu"))
        is_table = write(path, random.Random(seed))
        preferences.cache = lambda: pathlib.Path(folder)
        preferences.forget()
        preferences.settled.add("cpu")  # do not compare tables with other ranks
        try:
            refused = refusal(path)
            if is_table is not None and is_table != (refused is None):
                raise Taken(f"a file of preferences: {refused or 'taken, and it is no table'}")
            yield refused is None
        finally:
            preferences.cache = before
            preferences.forget()


def refusal(path: pathlib.Path) -> str | None:
    """Return the message with which a file is refused, None if it is accepted."""
    try:
        preferences.of("cpu")
    except ValueError as error:
        text = str(error)
        if str(path) not in text or "remove" not in text or len(text) > len(str(path)) + 250:
            raise Taken(f"a file of preferences is refused so: {text[:300]}") from error
        return text
    return None
