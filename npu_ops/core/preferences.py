"""Preference tables: `npu-ops tune` measures which implementation is fastest for a kind of call.

Each table is for one SoC. A table in the user's cache comes before one in the package. Without a
table, implementations keep their default order.

Ranks that compute one model must choose the same implementations, or their results differ in
rounding. So in a process group, the first rank that needs a table puts its fingerprint into the
group's store. The other ranks compare their fingerprints with it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pathlib
import re
import stat

import torch
from torch import distributed

from npu_ops.core import env, epoch, hardware

FORMAT = 1
PACKAGED = pathlib.Path(__file__).parent.parent / "preferences"
# A preference also applies to tensors about 2**REACH times smaller or larger than the measured one:
# the bit lengths of their numbers of elements may differ by REACH.
REACH = 3
_NUMEL_BITS = 64
# Limits that `read` enforces. A table of every op and three models has a few hundred kB.
_FIELDS = frozenset(
    {"op", "dtype", "width", "bits", "implementation", "us", "instead_of", "instead_us"}
)
_MAX_BYTES, _MAX_WIDTH, _MAX_US = 4 * 2**20, 2**63, 1e12

# Device types whose table was compared with the tables of the other ranks. The registry reads this.
settled: set[str] = set()
# Implementation names of each op. The registry fills this.
implementations: dict[str, list[str]] = {}

Class = tuple[torch.dtype, int]
Orders = dict[Class, list[str | None]]


def class_of(args: tuple) -> tuple[Class, int]:
    """Return the first tensor's class, (dtype, last dimension), and the bit length of its numel."""
    first = args[0]
    width = first.size(-1) if first.dim() else 0
    return (first.dtype, width), first.numel().bit_length()


@functools.cache
def of(device: str) -> dict[str, Orders]:
    """Return the table for a device type: op -> class -> preferred implementation by size.

    Raises:
        ValueError: the file is no valid table, or names an unknown op or implementation.
    """
    path = path_of(device)
    if path is None:
        return {}
    for row in rows_of(device):
        names = implementations.get(row["op"])
        if names is None:
            raise _no_table(path, "op", row["op"], "an op of this version of npu-ops")
        if row["implementation"] not in names:
            needs = f"one of {', '.join(names)} for {row['op']}"
            raise _no_table(path, "implementation", row["implementation"], needs)
    return orders(rows_of(device))


@functools.cache
def rows_of(device: str) -> list[dict]:
    """Return the rows of the table for a device type. The file is read once per process."""
    path = path_of(device)
    return [] if path is None else read(path)["rows"]


def path_of(device: str) -> pathlib.Path | None:
    """Return the table file that applies to a device type; None if there is none."""
    soc = soc_of(device)
    if soc is None:
        return None
    files = (folder / file_name(soc) for folder in (cache(), PACKAGED) if folder is not None)
    # Not Path.exists: it raises if this user may not read the folder.
    return next((file for file in files if os.path.exists(file)), None)


def soc_of(device: str) -> str | None:
    """Return the name of the NPU, GPU or CPU that a table is for; None without such a device."""
    if device == "npu":
        return hardware.npu_name()
    if device == "cuda":
        return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return hardware.processor() if device == "cpu" else None


def file_name(soc: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", soc).strip("-") + ".json"


def cache() -> pathlib.Path | None:
    """Return the folder of the user's tables; None for a user without a home."""
    return env.cache_folder("preferences")


def read(path: pathlib.Path) -> dict:
    """Read a table that `npu-ops tune` wrote.

    Raises:
        ValueError: the file is not such a table; the message says to remove it.
    """
    try:
        found = json.loads(_text(path), parse_constant=_no_number)
    except (OSError, RecursionError, ValueError) as error:
        raise ValueError(f"{path}: got no table of npu-ops tune ({error}); remove it") from None
    if not isinstance(found, dict) or not isinstance(found.get("rows"), list):
        raise ValueError(f"{path}: got no table of npu-ops tune (no list of rows); remove it")
    if found.get("format") != FORMAT:
        raise _no_table(path, "format", found.get("format"), FORMAT)
    for name in ("soc", "made"):
        if not isinstance(found.get(name, ""), str):
            raise _no_table(path, name, found[name], "text")
    for row in found["rows"]:
        _check(path, row)
    return found


def _text(path: pathlib.Path) -> str:
    # Without O_NONBLOCK, opening a FIFO waits for a writer.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("not a regular file")
        text = file.read(_MAX_BYTES + 1)
    if len(text) > _MAX_BYTES:
        raise ValueError(f"more than {_MAX_BYTES} bytes")
    return text.decode()


def _no_number(text: str):
    raise ValueError(f"{text} is not a number of JSON")


def _check(path: pathlib.Path, row: object) -> None:
    """Check each field of a row, and set missing optional fields to their defaults.

    Raises:
        ValueError: a field is missing, unknown or out of range.
    """
    if not isinstance(row, dict) or row.keys() - _FIELDS:
        raise _no_table(path, "row", row, f"an object with {', '.join(sorted(_FIELDS))}")
    row.setdefault("instead_of", row.get("implementation"))
    for name in ("op", "dtype", "implementation", "instead_of"):
        if not isinstance(row.get(name), str):
            raise _no_table(path, name, row.get(name), "a name")
    if not isinstance(getattr(torch, row["dtype"], None), torch.dtype):
        raise _no_table(path, "dtype", row["dtype"], "a dtype of torch")
    for name, end in (("width", _MAX_WIDTH), ("bits", _NUMEL_BITS)):
        if type(row.get(name)) is not int or not 0 <= row[name] < end:
            raise _no_table(path, name, row.get(name), f"a whole number from 0 to {end - 1}")
    for name in ("us", "instead_us"):
        if type(row.setdefault(name, 0.0)) not in (int, float) or not 0 <= row[name] < _MAX_US:
            raise _no_table(path, name, row[name], "a time in microseconds")


def _no_table(path: pathlib.Path, name: str, got: object, needs: object) -> ValueError:
    """Return the error for one field; shows at most 40 characters of its value."""
    shown = type(got).__name__ if isinstance(got, dict | list) else repr(got)
    shown = shown if len(shown) <= 40 else f"{shown[:40]}..."
    return ValueError(f"{path}: got {name} {shown}, needs {needs}; remove the file and tune again")


def orders(rows: list[dict]) -> dict[str, Orders]:
    """Make the lookup table of preferences, by op and class.

    Each value is a list, indexed by the bit length of the number of elements. An entry names the
    fastest implementation of the nearest measured size; it is None beyond a factor of 2**REACH.
    """
    measured: dict[tuple[str, Class], dict[int, str]] = {}
    for row in rows:
        of_class = getattr(torch, row["dtype"]), row["width"]
        measured.setdefault((row["op"], of_class), {})[row["bits"]] = row["implementation"]
    found: dict[str, Orders] = {}
    for (op, of_class), names in measured.items():
        found.setdefault(op, {})[of_class] = [_nearest(names, n) for n in range(_NUMEL_BITS)]
    return found


def _nearest(names: dict[int, str], bits: int) -> str | None:
    nearest = min(names, key=lambda known: (abs(known - bits), known))
    return names[nearest] if abs(nearest - bits) <= REACH else None


def fingerprint(device: str) -> str:
    """Return a short hash of the table for a device type; "none" without a table."""
    if path_of(device) is None:
        return "none"
    rows = json.dumps(rows_of(device), sort_keys=True)
    return hashlib.sha256(rows.encode()).hexdigest()[:12]


def settle(device: str) -> None:
    """Compare this rank's table for a device type with those of the default group's other ranks.

    Raises:
        RuntimeError: another rank has another table.
    """
    store = distributed.distributed_c10d._get_default_store()
    if store is not None:  # MPI has no store
        agree(store, device, distributed.get_rank(), fingerprint(device))
    settled.add(device)
    epoch.advance()


def agree(store, device: str, rank: int, mine: str) -> None:
    """Compare the fingerprint `mine` with the store's; store it if no rank did so before.

    Does not wait for other ranks.

    Raises:
        RuntimeError: another rank stored another fingerprint.
    """
    said = f"{mine} {rank}"
    first = store.compare_set(f"npu_ops/preferences/{device}", "", said).decode()
    theirs, _, other = first.partition(" ")
    if theirs != mine:
        raise RuntimeError(
            f"preferences: ranks {rank} and {other} have different tables for {device} ({mine} and "
            f"{theirs}) and would choose different implementations; give every machine the same "
            "file (npu-ops tune --export), or remove it from all (npu-ops tune --remove)"
        )


def forget() -> None:
    """Clear the caches, so that tables are read again when next needed."""
    of.cache_clear()
    rows_of.cache_clear()
    settled.clear()
    epoch.advance()
