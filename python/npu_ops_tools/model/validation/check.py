"""Predicts the measured rows, scores the predictions, and fits the model's few constants."""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib
import json
import lzma
import math
import pathlib
import statistics
from collections.abc import Iterable

from npu_ops_emulator import vendor

from npu_ops_tools.model import costs, ir, machine
from npu_ops_tools.model.costs import Costs
from npu_ops_tools.model.validation.cases import Candidate, Measured, candidates, rows

FITTED_ON = ("Add", "Mul", "DtypeCast", "triton_sigmoid", "triton_swish")
# Ops whose rows were looked at to correct the rates of cube cores (held_out.md).
LOOKED_AT = ("MatMulV2", "MatMulV3")
CONSTANTS = {  # constants that may be fitted for a family: five at most
    "Ascend910B4-1": ("launch", "program", "latency", "memory", "l2"),
    "Ascend910_93": ("launch", "program", "latency", "restart"),
}
LATENCIES = (0.2, 0.3, 0.45, 0.6, 0.8, 1.0)  # us; tried one by one: each needs a new simulation
COMPILED = pathlib.Path(__file__).with_name("compiled.json.xz")
SHORT = 10.0  # us; below it, most of the time is the launch


@dataclasses.dataclass(frozen=True)
class Point:
    """A measured row and its predictions, in microseconds.

    `bytes_only` is launch + bytes / memory, `waves_only` launch + waves x a constant; the constants
    of both are fitted on the same rows as the model's.
    """

    row: Measured
    model: float
    bytes_only: float
    waves_only: float

    @property
    def held_out(self) -> bool:
        return self.row.op not in (*FITTED_ON, *LOOKED_AT)

    @property
    def group(self) -> str:
        """The operator, by which rows are grouped."""
        return self.row.op

    @property
    def core(self) -> str:
        return "cube" if "MatMul" in self.row.op or self.row.op == "GroupedMatmul" else "vector"

    @property
    def us(self) -> float:
        return self.row.time


@dataclasses.dataclass(frozen=True)
class Score:
    """Score of some rows.

    count: number of rows. median, mean: of the relative errors |predicted / measured - 1|.
    bias: the median of predicted / measured. rank: Spearman's correlation; NaN if it is undefined.
    """

    count: int
    median: float
    mean: float
    bias: float
    rank: float


def points() -> list[Point]:
    """Return the rows with their predictions."""
    measured = list(rows())
    plain = _baselines(measured)
    found = []
    for row in measured:
        said = predict(row, costs.of(row.soc))
        found.append(Point(row, said, *plain[row.soc.startswith("Ascend910B4")](row)))
    return found


def predict(row: Measured, prices: Costs) -> float:
    """Return the predicted time of the fastest kernel that stands for a row."""
    said = [_time(walked, row, prices) for walked in _walked(row, prices)]
    return min(said)


def _time(walked: tuple, row: Measured, prices: Costs) -> float:
    candidate, cores, programs = walked
    return machine.combine(programs, candidate.grid, cores, prices, row.bytes).total


def _walked(row: Measured, prices: Costs) -> Iterable[tuple]:
    key = prices.replace(**dict.fromkeys(("launch", "program", "memory", "l2", "restart"), 0.0))
    for candidate in candidates(row):
        module = _module(candidate, row.soc)
        if module is None:
            continue
        most = machine.cores_of(module)
        cores = min(row.blocks or most, most)
        programs = _programs(candidate, row, cores, key.family, key.latency)
        yield candidate, cores, programs


@functools.cache
def _programs(candidate: Candidate, row: Measured, cores: int, family: str, latency: float):
    prices = costs.of(row.soc).replace(latency=latency)
    module = _module(candidate, row.soc)
    return machine.walk(module, list(candidate.values), (candidate.grid, 1, 1), prices, cores=cores)


@functools.cache
def _module(candidate: Candidate, soc: str) -> ir.Module | None:
    """Return the parsed kernel; None if its tiles do not fit the on-chip memory."""
    text = _compiled()[key(candidate, soc)]
    return ir.parse(text) if text else None


@functools.cache
def _compiled() -> dict[str, str]:
    return json.loads(lzma.decompress(COMPILED.read_bytes()))


def key(candidate: Candidate, soc: str) -> str:
    """Return a key of everything that the compiled kernel depends on."""
    parts = (candidate.kernel, dict(candidate.signature), dict(candidate.constants))
    return json.dumps([*parts, soc.removesuffix("-1")])


def compile_all() -> dict[str, str]:
    """Compile every candidate's kernel; "" if its tiles do not fit."""
    wanted = {key(each, row.soc): (each, row.soc) for row in rows() for each in candidates(row)}
    return {name: compile_one(*each) for name, each in sorted(wanted.items())}


def compile_one(candidate: Candidate, soc: str) -> str:
    vendor.frontend()
    kernels = importlib.import_module("npu_ops_tools.model.validation.kernels")
    kernel, soc = getattr(kernels, candidate.kernel), soc.removesuffix("-1")
    text = vendor.lower(kernel, dict(candidate.signature), dict(candidate.constants), soc)
    try:
        return vendor.pipes(candidate.kernel, text, soc)
    except vendor.CompileError as error:
        if "overflow" not in str(error):
            raise
        return ""


def keep(compiled: dict[str, str]) -> None:
    """Store the compiled kernels: some users have no compiler, and compiling takes minutes."""
    text = json.dumps(compiled, indent=0, sort_keys=True)
    COMPILED.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def score(found: list, said: str = "model") -> Score:
    """Score predictions of points or stages. said: the attribute to score."""
    predicted = [getattr(each, said) for each in found]
    measured = [each.us for each in found]
    ratios = [a / b for a, b in zip(predicted, measured, strict=True)]
    errors = [abs(ratio - 1) for ratio in ratios]
    ranks = _ranks(predicted), _ranks(measured)
    constant = min(len(set(each)) for each in ranks) < 2
    rank = math.nan if constant else statistics.correlation(*ranks)
    return Score(
        len(found), statistics.median(errors), statistics.fmean(errors), statistics.median(ratios),
        rank,
    )  # fmt: skip


def judged(found: list[Point], core: str = "vector") -> list[Point]:
    """Return the rows for the accuracy gate: held out, and longer than 10 us."""
    return [p for p in found if p.core == core and p.held_out and p.row.time > SHORT]


def likely(found: list[Point]) -> list[Point]:
    """Return the rows with predictions scaled by the other operators' median of measured /
    predicted."""
    medians = {op: statistics.median(each) for op, each in ratios(found).items()}
    return [
        dataclasses.replace(point, model=point.model * statistics.median(
            value for op, value in medians.items() if op != point.group
        ))
        for point in found
    ]  # fmt: skip


def ratios(found: list) -> dict[str, list[float]]:
    """Return measured / predicted of points or stages, by group."""
    by_group = collections.defaultdict(list)
    for each in found:
        by_group[each.group].append(each.us / each.model)
    return by_group


def _ranks(values: list[float]) -> list[float]:
    """Return ranks from 1; equal values share their mean rank."""
    order = sorted(values)
    return [order.index(value) + (order.count(value) + 1) / 2 for value in values]


def _baselines(measured: list[Measured]) -> dict[bool, object]:
    """Return the baselines of 910B4 and of other SoCs: functions of a row that return both
    times."""
    return {b4: _baseline([row for row in measured if _is_b4(row) == b4]) for b4 in (True, False)}


def _is_b4(row: Measured) -> bool:
    return row.soc.startswith("Ascend910B4")


def _baseline(measured: list[Measured]):
    fitted = [row for row in measured if row.op in FITTED_ON]

    def by_bytes(row: Measured, x: list[float]) -> float:
        return x[0] + x[1] * _cores(row) + row.bytes / x[2] / 1e6

    def by_waves(row: Measured, x: list[float]) -> float:
        return x[0] + x[1] * -(-_grid(row) // _cores(row))

    first = minimise(lambda x: _loss(fitted, lambda row: by_bytes(row, x)), [1.0, 0.1, 1.2])
    second = minimise(lambda x: _loss(fitted, lambda row: by_waves(row, x)), [1.0, 1.9])
    return lambda row: (by_bytes(row, first), by_waves(row, second))


def _cores(row: Measured) -> int:
    return row.blocks if 0 < row.blocks <= 48 else (40 if _is_b4(row) else 48)


def _grid(row: Measured) -> int:
    return candidates(row)[0].grid


def _loss(measured: list[Measured], said) -> float:
    return statistics.fmean(abs(math.log(said(row) / row.time)) for row in measured)


def fit(family: str) -> dict[str, float]:
    """Fit the constants of a family to the rows of FITTED_ON."""
    names = CONSTANTS[family]
    fitted = [row for row in rows() if row.op in FITTED_ON and costs.of(row.soc).family == family]
    best = (math.inf, {})
    for latency in LATENCIES:
        free = [name for name in names if name != "latency"]
        start = costs.of(fitted[0].soc).replace(latency=latency)

        def with_(x, free=free, start=start) -> Costs:
            return start.replace(**dict(zip(free, x, strict=True)))

        def loss(x, with_=with_) -> float:
            return _loss(fitted, lambda row: predict(row, with_(x)))

        x = minimise(loss, [getattr(start, name) for name in free])
        best = min(best, (loss(x), {**dict(zip(free, x, strict=True)), "latency": latency}),
                   key=lambda pair: pair[0])  # fmt: skip
    return best[1]


def minimise(function, start: list[float], turns: int = 40, smallest: float = 0.005) -> list[float]:
    """Minimize over positive numbers, one coordinate after the other, with decreasing steps."""
    best, step = list(start), 0.5
    lowest = function(best)
    for _ in range(turns):
        moved = False
        for i in range(len(best)):
            for factor in (1 + step, 1 / (1 + step)):
                tried = [*best[:i], best[i] * factor, *best[i + 1 :]]
                value = function(tried)
                if value < lowest - 1e-9:
                    best, lowest, moved = tried, value, True
        step = step if moved else step / 2
        if step < smallest:
            break
    return best
