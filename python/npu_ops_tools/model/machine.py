"""Simulates all cores of an SoC, and computes the time of a launch."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Iterator

from npu_ops_tools.model.core import Core, Load, Program, Span, nothing
from npu_ops_tools.model.costs import Costs
from npu_ops_tools.model.ir import Module

Grid = tuple[int, int, int]
PROGRAMS = 8  # programs to simulate; the others are assumed to take the mean of their times


class Unknown(ValueError):
    """The model lacks knowledge of a kernel; `what` counts each unknown."""

    def __init__(self, kernel: str, what: dict[str, int]):
        self.kernel, self.what = kernel, dict(what)
        listed = ", ".join(f"{name} ({count})" for name, count in sorted(self.what.items()))
        super().__init__(f"npu-model cannot predict {kernel}, unknown: {listed}")


@dataclasses.dataclass
class Walked:
    """One simulated program: its time and the totals of its pipes and transfers, in us and
    bytes."""

    index: int
    time: float
    busy: dict[str, float]
    bytes: dict[str, float]
    spans: dict[str, list[Span]]
    assumed: bool


@dataclasses.dataclass
class Time:
    """Time of a launch in microseconds.

    memory: time for the bytes alone. start: time to start its programs. cores: time of the busiest
    core.
    """

    total: float
    cores: float
    memory: float
    start: float
    programs: list[Walked]
    moved: dict[str, float]
    waves: int
    balance: float


def run(
    module: Module,
    arguments: list,
    grid: Grid,
    costs: Costs,
    *,
    footprint: float,
    load: Load = nothing,
    spans: bool = False,
) -> Time:
    """Return the time of a launch.

    footprint: bytes of its tensors, which the cache has to hold.

    Raises:
        Unknown: the kernel has operations, bounds or conditions that are unknown to the model.
    """
    walked = walk(module, arguments, grid, costs, load=load, spans=spans)
    count = grid[0] * grid[1] * grid[2]
    return combine(walked, count, cores_of(module), costs, footprint)


def cores_of(module: Module) -> int:
    """Return how many programs run at once."""
    return module.cores["vector" if module.core == "vector" else "cube"]


def walk(
    module: Module,
    arguments: list,
    grid: Grid,
    costs: Costs,
    *,
    cores: int = 0,
    load: Load = nothing,
    spans: bool = False,
) -> list[Walked]:
    """Simulate at most PROGRAMS programs of a launch; with `spans`, record the first one's `Span`s.

    cores: how many of the SoC's cores it may use; 0: all.

    Raises:
        Unknown: see `run`.
    """
    count = grid[0] * grid[1] * grid[2]
    using = min(count, cores or cores_of(module)) * (2 if module.core == "mixed" else 1)
    walked = []
    for index in _sample(count):
        program = Program(arguments, grid, index, load)
        walked.append(_walk(module, program, costs, using, spans and not walked))
    return walked


def _sample(count: int) -> list[int]:
    if count <= PROGRAMS:
        return list(range(count))
    return sorted({round(i * (count - 1) / (PROGRAMS - 1)) for i in range(PROGRAMS)})


def combine(walked: list[Walked], count: int, cores: int, costs: Costs, footprint: float) -> Time:
    """Return the time of `count` programs, some of which were simulated (`walked`).

    Cores start one after the other, and take a new program when they are free. If the tensors
    exceed the cache, all cores share the memory; repeated loads come from the cache.
    """
    mean = statistics.fmean(each.time for each in walked)
    longest = max(each.time for each in walked)
    waves = -(-count // cores)
    work = max(waves * mean, longest)
    busiest = work + (waves - 1) * costs.restart
    moved: collections.Counter[str] = collections.Counter()
    for each in walked:
        moved.update({name: value * count / len(walked) for name, value in each.bytes.items()})
    once = sum(min(moved[way], footprint) for way in ("loaded", "stored"))
    memory = once / costs.memory if footprint > costs.l2 else 0.0
    start = costs.launch + costs.program * min(count, cores)
    balance = min(1.0, mean * count / (work * min(count, cores)))
    total = start + max(busiest, memory)
    return Time(total, busiest, memory, start, walked, dict(moved), waves, balance)


def _walk(module: Module, program: Program, costs: Costs, using: int, spans: bool) -> Walked:
    cores = _cores(module, program, costs, using, spans)
    waiting = {name: core.run() for name, core in cores.items()}
    _interleave(cores, waiting)
    unknown = sum((core.unknown for core in cores.values()), collections.Counter())
    if unknown:
        raise Unknown(module.functions[0].name, unknown)
    busy = {f"{name}.{pipe}": t for name, core in cores.items() for pipe, t in core.busy.items()}
    moved = sum((core.bytes for core in cores.values()), collections.Counter())
    kept = {name: core.spans for name, core in cores.items() if core.spans}
    assumed = any(core.assumed for core in cores.values())
    end = max(core.end for core in cores.values())
    return Walked(program.index, end, busy, moved, kept, assumed)


def _cores(
    module: Module, program: Program, costs: Costs, using: int, spans: bool
) -> dict[str, Core]:
    """Return the cores that run a program of the kernel.

    A vector or cube kernel has one core, a mixed kernel a cube core and two vector cores.
    """
    found = {}
    for function in module.functions:
        halves = (0, 1) if function.core == "vector" and module.core == "mixed" else (0,)
        for half in halves:
            name = function.core + (str(half) if len(halves) > 1 else "")
            found[name] = Core(module, function, program, costs, using, half, [] if spans else None)
    return found


def _interleave(cores: dict[str, Core], running: dict[str, Iterator]) -> None:
    """Run each core until it waits for a flag that is not set; stop if none can continue."""
    wanted: dict[str, tuple | None] = dict.fromkeys(running)
    moved = True
    while running and moved:
        moved = False
        for name in list(running):
            while wanted[name] is None or _granted(cores, name, wanted[name]):
                moved = True
                try:
                    wanted[name] = next(running[name])
                except StopIteration:
                    del running[name]
                    break
    for name in running:
        cores[name].unknown["a flag that another core never sets"] += 1


def _granted(cores: dict[str, Core], name: str, wanted: tuple) -> bool:
    """Take a flag that the other kind of core set; a cube core needs it from both vector cores."""
    flag, pipe = wanted
    others = [other for each, other in cores.items() if (each == "cube") != (name == "cube")]
    queues = [other.flags["block", flag, name if name != "cube" else ""] for other in others]
    if not all(queues):
        return False
    cores[name].hold(pipe, max(queue.popleft() for queue in queues))
    return True
