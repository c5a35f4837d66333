"""Fits constants of the model to the times of the microbenchmarks, and reports the error."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Iterator

import torch
from npu_ops_emulator import vendor

from npu_ops_tools.compile.launches import Launch, recorded
from npu_ops_tools.model import costs, ir, machine
from npu_ops_tools.model.calibration import benchmarks
from npu_ops_tools.model.costs import Costs
from npu_ops_tools.model.prediction import module_of
from npu_ops_tools.model.validation.check import minimise
from npu_ops_tools.verify.jobs import MICROBENCHMARKS

# Calibration fits these five constants and leaves the others of costs.csv as they are. For the
# other groups of microbenchmarks, it only compares predictions with measurements.
CONSTANTS = ("launch", "program", "latency", "memory", "restart")
FITTED_ON = ("launch by blocks", "copy by cores")
LATENCIES = (0.05, 2.0)  # us: search range of the latency


@dataclasses.dataclass(frozen=True)
class Fit:
    """The result of a fit.

    was, now: the constants before and after. off: for each group of microbenchmarks, the median of
    measured over predicted times, with the constants before and after.
    """

    soc: str
    was: dict[str, float]
    now: dict[str, float]
    off: dict[str, tuple[float, float]]

    def fields(self) -> dict:
        return dataclasses.asdict(self)


class Predicted:
    """The model's predictions for the microbenchmarks of an SoC."""

    def __init__(self, soc: str):
        self.soc = soc
        self.launches = launches(soc)

    @functools.cached_property
    def modules(self) -> dict[tuple[str, str], ir.Module]:
        """The compiled modules; launches that differ only in numbers share one."""
        compiled: dict[Launch, ir.Module] = {}
        for launch in self.launches.values():
            alike = dataclasses.replace(launch, case="")
            if alike not in compiled:
                compiled[alike] = module_of(launch, self.soc)
        return {
            key: compiled[dataclasses.replace(launch, case="")]
            for key, launch in self.launches.items()
        }

    def of(self, key: tuple[str, str], prices: Costs) -> float:
        """Return the predicted time in microseconds."""
        launch, module = self.launches[key], self.modules[key]
        count, cores = launch.grid[0], machine.cores_of(module)
        walked = self._walked(key, prices.latency)
        return machine.combine(walked, count, cores, prices, _footprint(launch)).total

    @functools.cache  # noqa: B019 - lives only as long as a fit
    def _walked(self, key: tuple[str, str], latency: float) -> list[machine.Walked]:
        launch, prices = self.launches[key], costs.of(self.soc).replace(latency=latency)
        return machine.walk(self.modules[key], list(launch.values), (launch.grid[0], 1, 1), prices)


def launches(soc: str) -> dict[tuple[str, str], Launch]:
    """Return the launch of each microbenchmark, by its group and name."""
    found = {}
    for one in benchmarks.of(*vendor.cores(soc.removesuffix("-1"))):
        with recorded(one.name) as launched:
            one.make(torch.device("cpu"))()
        (found[one.group, one.name],) = launched
    return found


def _footprint(launch: Launch) -> float:
    return float(sum(x.nbytes for x in launch.values if isinstance(x, torch.Tensor)))


def measured(report: dict) -> tuple[str, dict[tuple[str, str], float]]:
    """Return the SoC and the microbenchmark times of a report of `npu-ops verify --full`.

    Raises:
        ValueError: the report has none.
    """
    for result in report["results"]:
        if result["kind"] == MICROBENCHMARKS and result.get(MICROBENCHMARKS):
            times = {
                (row["group"], row["name"]): float(row["us"]) for row in result[MICROBENCHMARKS]
            }
            return result["soc"], times
    raise ValueError("the report has no microbenchmarks, needs npu-ops verify --full on an NPU")


def fit(soc: str, times: dict[tuple[str, str], float], said: Predicted | None = None) -> Fit:
    """Return the constants that fit best.

    Raises:
        ValueError: there are no costs for this SoC, or the times are of unknown microbenchmarks.
    """
    before, said = costs.of(soc), said or Predicted(soc)
    unknown = times.keys() - said.launches.keys()
    if unknown or not times:
        names = ", ".join(sorted(" ".join(key) for key in unknown)) or "none"
        raise ValueError(f"microbenchmarks: got {names}, needs those of this version and SoC")
    fitted = {key: us for key, us in times.items() if key[0] in FITTED_ON}

    def at(latency: float) -> tuple[float, Costs]:
        return _fitted(fitted, said, before.replace(latency=latency))

    after = _lowest(at)[1]
    off = {
        group: tuple(
            statistics.median(us / said.of(key, p) for key, us in times.items() if key[0] == group)
            for p in (before, after)
        )
        for group in dict.fromkeys(key[0] for key in times)
    }
    was, now = ({name: getattr(p, name) for name in CONSTANTS} for p in (before, after))
    return Fit(soc, was, now, off)


def _fitted(times: dict, said: Predicted, start: Costs) -> tuple[float, Costs]:
    """Return the loss and the constants fitted with a fixed latency.

    Another latency needs another simulation.
    """
    free = [name for name in CONSTANTS if name != "latency"]

    def with_(x: list[float]) -> Costs:
        return start.replace(**dict(zip(free, x, strict=True)))

    def loss(x: list[float]) -> float:
        prices = with_(x)
        return statistics.fmean(math.log(said.of(k, prices) / us) ** 2 for k, us in times.items())

    x = minimise(loss, [getattr(start, name) for name in free], turns=200, smallest=1e-3)
    return loss(x), with_(x)


def _lowest(at, steps: int = 12):
    """Find the minimum by golden-section search over the logarithm."""
    low, high = map(math.log, LATENCIES)
    part = (math.sqrt(5) - 1) / 2
    inner = [high - part * (high - low), low + part * (high - low)]
    found = [at(math.exp(x)) for x in inner]
    for _ in range(steps):
        if found[0][0] < found[1][0]:
            high, inner[1], found[1] = inner[1], inner[0], found[0]
            inner[0] = high - part * (high - low)
            found[0] = at(math.exp(inner[0]))
        else:
            low, inner[0], found[0] = inner[0], inner[1], found[1]
            inner[1] = low + part * (high - low)
            found[1] = at(math.exp(inner[1]))
    return min(found, key=lambda pair: pair[0])


_UNITS = {"memory": ("GB/s", 1e-3)}  # the others are us


def lines(found: Fit) -> Iterator[str]:
    """Format a fit as lines of text."""
    yield f"{found.soc}: constants that fit the microbenchmarks"
    for name, now in found.now.items():
        unit, scale = _UNITS.get(name, ("us", 1.0))
        was = found.was[name]
        yield (
            f"  {name:8} {was * scale:9.4g} -> {now * scale:9.4g} {unit}, {now / was:.2f} "
            "times as large"
        )
    yield "measured time / predicted time, with the old and the new constants:"
    for group, (before, after) in found.off.items():
        fitted = "" if group in FITTED_ON else "  (from the vendor's tables, not fitted)"
        yield f"  {group:18} {before:5.2f} {after:5.2f}{fitted}"
