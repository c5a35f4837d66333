"""Which implementation a call prefers on this machine, by what `npu-ops tune` measured there.

A table is of one SoC. The user's is in the cache, others come with the package; the user's comes
first. Without a table nothing is preferred, and the order of the implementations is their own.

Ranks that compute one model must choose alike, or their results differ in rounding: in a process
group the first rank to need a table leaves its fingerprint in the group's store, and the others
compare theirs.
"""

from __future__ import annotations

import functools
import hashlib
import json
import pathlib
import re

import torch
from torch import distributed

from npu_ops.core import env, hardware

FORMAT = 1
PACKAGED = pathlib.Path(__file__).parent.parent / "preferences"
# How far from a class that was measured, in powers of two of elements, its preference holds.
REACH = 3
_NUMEL_BITS = 64

# Device types whose tables are known to be those of the other ranks. The registry looks here.
settled: set[str] = set()

Class = tuple[torch.dtype, int]
Orders = dict[Class, list[str | None]]


def class_of(args: tuple) -> tuple[Class, int]:
    """The class of a call, by its first tensor: dtype and width, and elements in powers of two."""
    first = args[0]
    width = first.size(-1) if first.dim() else 0
    return (first.dtype, width), first.numel().bit_length()


@functools.cache
def of(device: str) -> dict[str, Orders]:
    """The table for a type of device here: of each op the preferred name by class and elements."""
    path = path_of(device)
    return {} if path is None else orders(read(path)["rows"])


def path_of(device: str) -> pathlib.Path | None:
    """The file that is in force for a type of device; None where there is none."""
    soc = soc_of(device)
    if soc is None:
        return None
    files = (folder / file_name(soc) for folder in (cache(), PACKAGED) if folder is not None)
    return next((file for file in files if file.exists()), None)


def soc_of(device: str) -> str | None:
    """What a table is of: the name of the NPU, the GPU or the processor; None without one."""
    if device == "npu":
        return hardware.npu_name()
    if device == "cuda":
        return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return hardware.processor() if device == "cpu" else None


def file_name(soc: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", soc).strip("-") + ".json"


def cache() -> pathlib.Path | None:
    """The folder of the user's tables; None for a user without a home."""
    return env.cache_folder("preferences")


def read(path: pathlib.Path) -> dict:
    """A table that `npu-ops tune` wrote.

    Raises:
        ValueError: the file is something else.
    """
    try:
        found = json.loads(path.read_text())
        known = found["format"] == FORMAT
        orders(found["rows"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: got no table of npu-ops tune ({error}); remove it") from None
    if not known:
        raise ValueError(f"{path}: got format {found['format']}, needs {FORMAT}; tune again")
    return found


def orders(rows: list[dict]) -> dict[str, Orders]:
    """For each op and class a list by the elements' bits: a name, or None far from all measured."""
    measured: dict[tuple[str, Class], dict[int, str]] = {}
    for row in rows:
        of_class = getattr(torch, row["dtype"]), int(row["width"])
        measured.setdefault((row["op"], of_class), {})[int(row["bits"])] = row["implementation"]
    found: dict[str, Orders] = {}
    for (op, of_class), names in measured.items():
        found.setdefault(op, {})[of_class] = [_nearest(names, n) for n in range(_NUMEL_BITS)]
    return found


def _nearest(names: dict[int, str], bits: int) -> str | None:
    nearest = min(names, key=lambda known: (abs(known - bits), known))
    return names[nearest] if abs(nearest - bits) <= REACH else None


def fingerprint(device: str) -> str:
    """Which table is in force, in a few letters; equal tables have equal ones."""
    path = path_of(device)
    if path is None:
        return "none"
    rows = json.dumps(read(path)["rows"], sort_keys=True)
    return hashlib.sha256(rows.encode()).hexdigest()[:12]


def settle(device: str) -> None:
    """Compare the table for a type of device with that of the default process group's other ranks.

    Raises:
        RuntimeError: another rank has another table.
    """
    store = distributed.distributed_c10d._get_default_store()
    if store is not None:  # MPI has none
        agree(store, device, distributed.get_rank(), fingerprint(device))
    settled.add(device)


def agree(store, device: str, rank: int, mine: str) -> None:
    """Leave `mine` in the store, or compare it with what the first rank left. Waits for nobody."""
    said = f"{mine} {rank}"
    first = store.compare_set(f"npu_ops/preferences/{device}", "", said).decode()
    theirs, _, other = first.partition(" ")
    if theirs != mine:
        raise RuntimeError(
            f"preferences: rank {rank} has another table for {device} than rank {other} ({mine} "
            f"and {theirs}), so they would choose other implementations; give every machine the "
            "same file (npu-ops tune --export), or remove it from all (npu-ops tune --remove)"
        )


def forget() -> None:
    """Read the tables again when they are next needed."""
    of.cache_clear()
    settled.clear()
