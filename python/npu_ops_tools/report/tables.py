"""Reads CSV files of `npu-ops compile --csv` and benchmarks/model_ops.py for the report."""

from __future__ import annotations

import csv
import dataclasses
import pathlib
import re

_COMPILED = {"op", "kernel", "soc", "core", "ub_bytes", "scalar_loops", "multi_buffer"}
_PREDICTED = {"call", "kernel", "us", "low_us", "high_us", "label"}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel of an op on an SoC, with the most on-chip memory that any of its launches needs."""

    op: str
    kernel: str
    soc: str
    core: str
    ub_kb: float
    scalar_loops: int
    multi_buffer: bool
    launches: int


@dataclasses.dataclass(frozen=True)
class Predicted:
    """A kernel's prediction by `npu-ops model`.

    bytes_per_token: bytes that the kernel loads and stores in global memory.
    """

    call: str
    kernel: str
    soc: str
    us: float
    low_us: float
    high_us: float
    of_limit: float
    bottleneck: str
    bytes_per_token: float | None
    label: str
    commit: str


def fields_of(path: pathlib.Path) -> set[str]:
    """Return the columns of a CSV."""
    with path.open(newline="") as file:
        return set(next(csv.reader(file), ()))


def is_compiled(path: pathlib.Path) -> bool:
    return fields_of(path) >= _COMPILED


def is_predicted(path: pathlib.Path) -> bool:
    return fields_of(path) >= _PREDICTED


def compiled(path: pathlib.Path) -> list[Compiled]:
    """Return a row for each op, kernel and SoC, over all its launches."""
    groups: dict[tuple, list[dict]] = {}
    for row in _rows(path):
        if row["ub_bytes"]:  # it compiled
            groups.setdefault((row["op"], row["kernel"], row["soc"]), []).append(row)
    return [
        Compiled(
            *key, found[0]["core"], max(int(row["ub_bytes"]) for row in found) / 1024,
            sum(row["scalar_loops"] not in ("()", "[]", "") for row in found),
            all(row["multi_buffer"] == "True" for row in found), len(found),
        )
        for key, found in sorted(groups.items())
    ]  # fmt: skip


def predicted(path: pathlib.Path) -> list[Predicted]:
    """Return the rows. A call's name contains its number of tokens or sequences."""
    return [
        Predicted(
            row["call"], row["kernel"], row["soc"], float(row["us"]), float(row["low_us"]),
            float(row["high_us"]), float(row["of_limit"]), row["bottleneck"], _per_token(row),
            row["label"], row["git"],
        )
        for row in _rows(path)
    ]  # fmt: skip


def _per_token(row: dict) -> float | None:
    sizes = {name: int(n) for name, n in re.findall(r"\b([TB])=(\d+)", row["call"])}
    tokens = sizes.get("T", 1) * sizes.get("B", 1)
    moved = sum(float(row[name]) for name in ("loaded_mb", "stored_mb"))
    return moved * 1e6 / tokens if sizes else None


def _rows(path: pathlib.Path) -> list[dict]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
