"""What things cost on an SoC: costs.csv, which says of each number where it is from."""

from __future__ import annotations

import csv
import dataclasses
import functools
import pathlib

FILE = pathlib.Path(__file__).with_name("costs.csv")
REPEAT = 256  # bytes that a vector instruction processes at a time
MOST_REPEATS = 255  # of one instruction
LISTS = ("read_by_cores", "write_by_cores", "range_vector", "range_cube", "range_mixed")
FITTED = ("launch", "program", "latency", "memory", "l2", "restart")


@dataclasses.dataclass(frozen=True)
class Vector:
    """A vector instruction, in cycles: of each repeat, and of starting it."""

    repeat: float
    start: float


@dataclasses.dataclass(frozen=True)
class Costs:
    """One family of SoCs. Times in microseconds, rates in bytes a microsecond.

    FITTED are the only ones that measured times were used for; the others are from tables.
    launch: of a kernel; program: of starting one on each core; restart: of a core between two.
    latency: from the end of a vector core's transfer until its flag is seen; fixpipe_latency: of a
    cube core's store. handover: from the end of a vector core's store until a cube core may load
    it. memory: of all cores together, for tensors of more than `l2` bytes, which is what the cache
    holds. read_cache, write_cache, cache_to_l1: of one core, to and from the cache. range_vector,
    range_cube, range_mixed: what measured times are of the predicted: at least, likely, at most.
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
        """The rate of one core while `cores` read."""
        return self.read_by_cores[min(cores, len(self.read_by_cores)) - 1]

    def write(self, cores: int) -> float:
        return self.write_by_cores[min(cores, len(self.write_by_cores)) - 1]

    def within(self, core: str) -> tuple[float, ...]:
        """What times are of the predicted, by the cores that a kernel runs on."""
        return getattr(self, f"range_{core}")

    def replace(self, **changes) -> Costs:
        return dataclasses.replace(self, **changes)


def families() -> list[str]:
    return [name for name in dict.fromkeys(row["family"] for row in _rows()) if name != "all"]


def of(soc: str) -> Costs:
    """
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


# Into cycles, microseconds and bytes a microsecond.
_UNITS = {"GB/s": 1e3, "MB": 1e6, "MHz": 1.0}


def _values(family: str) -> dict[str, list[float]]:
    """The numbers of each name; a family may take what another has ("as Ascend910B1")."""
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
