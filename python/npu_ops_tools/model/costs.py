"""Reads the costs of operations on an SoC from costs.csv, which names each number's source."""

from __future__ import annotations

import csv
import dataclasses
import functools
import pathlib

FILE = pathlib.Path(__file__).with_name("costs.csv")
REPEAT = 256  # bytes per repeat of a vector instruction
MOST_REPEATS = 255  # repeats of one instruction at most
LISTS = ("read_by_cores", "write_by_cores", "range_vector", "range_cube", "range_mixed")
FITTED = ("launch", "program", "latency", "memory", "l2", "restart")


@dataclasses.dataclass(frozen=True)
class Vector:
    """Costs of a vector instruction in cycles: per repeat, and to start it."""

    repeat: float
    start: float


@dataclasses.dataclass(frozen=True)
class Costs:
    """Costs of one family of SoCs. Times in microseconds, rates in bytes per microsecond.

    FITTED constants, fixpipe_latency and handover were fitted to measured times. Others are from
    tables or assumed; costs.csv has the source of each.

    launch: to launch a kernel.
    program: to start a program on each core.
    restart: between two programs on one core.
    latency: from the end of a vector core's transfer until its flag is visible.
    fixpipe_latency: the same for a cube core's store.
    handover: from the end of a vector core's store until a cube core can load the data.
    memory: rate of all cores together, for tensors larger than `l2`, the capacity of the cache in
    bytes.
    read_cache, write_cache, cache_to_l1: rates of one core to and from the cache.
    range_vector, range_cube, range_mixed: measured over predicted time: low, likely, high.
    """

    family: str
    clock: float
    launch: float
    program: float
    latency: float
    fixpipe_latency: float
    handover: float
    memory: float
    l2: float
    read_by_cores: tuple[float, ...]
    write_by_cores: tuple[float, ...]
    read_to_l1: float
    cache_to_l1: float
    read_cache: float
    write_cache: float
    write_from_l0c: float
    l1_to_l0a: float
    l1_to_l0b: float
    burst: float
    issue: float
    scalar: float
    divide: float
    scalar_load: float
    flag: float
    block_flag: float
    restart: float
    range: float
    range_vector: tuple[float, ...]
    range_cube: tuple[float, ...]
    range_mixed: tuple[float, ...]
    vector: dict[str, Vector]

    def read(self, cores: int) -> float:
        """Return the read rate of one core while `cores` cores read."""
        return self.read_by_cores[min(cores, len(self.read_by_cores)) - 1]

    def write(self, cores: int) -> float:
        return self.write_by_cores[min(cores, len(self.write_by_cores)) - 1]

    def within(self, core: str) -> tuple[float, ...]:
        """Return the range of measured over predicted time, for a kernel's kind of core."""
        return getattr(self, f"range_{core}")

    def replace(self, **changes) -> Costs:
        return dataclasses.replace(self, **changes)


def families() -> list[str]:
    return [name for name in dict.fromkeys(row["family"] for row in _rows()) if name != "all"]


def of(soc: str) -> Costs:
    """Return the costs of an SoC.

    Raises:
        ValueError: no costs are known for this SoC.
    """
    found = [name for name in families() if soc.startswith(name)]
    if not found:
        raise ValueError(f"soc: got {soc!r}, needs one of {', '.join(families())}")
    return _costs(max(found, key=len))


@functools.cache
def _costs(family: str) -> Costs:
    values = _values("all") | _values(family)
    vector = {
        name.removeprefix("vector "): Vector(numbers[0], numbers[1] + numbers[2])
        for name, numbers in values.items()
        if name.startswith("vector ")
    }
    single = {
        field.name: values[field.name.replace("_", " ")]
        for field in dataclasses.fields(Costs)
        if field.name not in ("family", "vector")
    }
    lists = {name: tuple(single[name]) for name in LISTS}
    numbers = {name: value[0] for name, value in single.items()} | lists
    return Costs(family=family, vector=vector, **numbers)


# Factors from the units of costs.csv to those of `Costs`: bytes per us, bytes, cycles per us.
_UNITS = {"GB/s": 1e3, "MB": 1e6, "MHz": 1.0}


def _values(family: str) -> dict[str, list[float]]:
    """Return the numbers of each name. A family may inherit another's ("as Ascend910B1")."""
    found = {}
    for row in _rows():
        if row["family"] != family:
            continue
        if row["name"] == "as":
            found |= _values(row["value"])
            continue
        scale = _UNITS.get(row["unit"].partition(" ")[0], 1.0)
        found[row["name"]] = [float(number) * scale for number in row["value"].split()]
    return found


@functools.cache
def _rows() -> list[dict[str, str]]:
    with FILE.open(newline="") as file:
        return list(csv.DictReader(file))
