"""Times calls alternately until their medians are stable; measures memory and rooflines."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import gc
import math
import pathlib
import time
from collections.abc import Callable

import torch

# A median is stable if its 95 % interval is within this fraction of it.
WITHIN = 0.05
LEAST_RUNS = 7


@dataclasses.dataclass
class Times:
    """Seconds per call, in the order of measurement; each is the mean of `calls` calls in a row."""

    calls: int
    seconds: list[float] = dataclasses.field(default_factory=list)

    def percentile(self, percent: int) -> float:
        """Return a percentile, linearly interpolated."""
        ordered = sorted(self.seconds)
        at = (len(ordered) - 1) * percent / 100
        low = math.floor(at)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (at - low)

    def interval(self) -> tuple[float, float]:
        """Return the 95 % confidence interval of the median, for any distribution."""
        below = _ranks(len(self.seconds))
        ordered = sorted(self.seconds)
        return ordered[below], ordered[-1 - below]

    def stable(self) -> bool:
        """Return whether the interval is within WITHIN of the median."""
        if len(self.seconds) < LEAST_RUNS:
            return False
        low, high = self.interval()
        middle = self.percentile(50)
        return low >= (1 - WITHIN) * middle and high <= (1 + WITHIN) * middle


@functools.cache
def _ranks(runs: int) -> int:
    """Return how many sorted measurements lie outside each end of the median's 95 % interval.

    The number follows from the binomial distribution.
    """
    chance, below = 0.0, 0
    while below < runs // 2:
        chance += math.comb(runs, below) / 2**runs
        if chance > 0.025:
            break
        below += 1
    return max(below - 1, 0)


def interleaved(calls: dict[str, Callable], device: str, longest: float) -> dict[str, Times]:
    """Time all calls alternately, so that all see the same noise, until every median is stable.

    The order is reversed in every other round.

    Args:
        longest: seconds after which timing stops anyway, once each call ran LEAST_RUNS times.
    """
    found = {name: Times(_repeats(call, device)) for name, call in calls.items()}
    start, turn = time.perf_counter(), 0
    while turn < LEAST_RUNS or time.perf_counter() - start < longest:
        for name in list(calls)[:: 1 if turn % 2 else -1]:
            found[name].seconds.append(seconds(calls[name], found[name].calls, device))
        turn += 1
        if all(times.stable() for times in found.values()):
            break
    return found


def _repeats(call: Callable, device: str) -> int:
    """Return how many calls one measurement needs, so that the clock's resolution does not matter.

    Runs the call twice before: the first may compile, the second may touch new memory.
    """
    for _ in range(2):
        call()
    return max(1, min(1000, int(0.002 / max(seconds(call, 1, device), 1e-6))))


def seconds(call: Callable, calls: int, device: str) -> float:
    """Return the mean seconds per call over `calls` calls."""
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    _synchronize(device)
    return (time.perf_counter() - start) / calls


def _synchronize(device: str) -> None:
    if device != "cpu":
        getattr(torch, torch.device(device).type).synchronize()


def peak_mb(call: Callable, device: str) -> float | None:
    """Return the peak memory that a call needs beyond what was allocated, in 10^6 bytes.

    None if unknown.
    """
    if device != "cpu":
        return _peak_of_device(call, getattr(torch, torch.device(device).type))
    status = pathlib.Path("/proc/self/status")
    if not status.exists():
        return None
    call()  # excludes memory that is allocated only once
    gc.collect()  # excludes memory that is freed meanwhile
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)  # glibc would reuse freed memory, which would not be counted
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = _status_kb(status, "VmRSS")
    result = call()
    peak = _status_kb(status, "VmHWM")
    del result
    return max(0.0, (peak - before) * 1024 / 1e6)


def _peak_of_device(call: Callable, device) -> float:
    device.synchronize()
    device.reset_peak_memory_stats()
    before = device.memory_allocated()
    result = call()
    device.synchronize()
    del result
    return (device.max_memory_allocated() - before) / 1e6


def _status_kb(status: pathlib.Path, field: str) -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1])


def copy_of(moved: int, device: str) -> Callable[[], None]:
    """Return a copy within allocated memory: a bound for kernels.

    Its reads and writes add up to `moved` bytes.
    """
    size = max(1, moved // 2)
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    return lambda: target.copy_(source)


@functools.cache
def matmul_tflops(dtype: torch.dtype, device: str) -> float:
    """Return the rate of a product of square matrices, the best of a few runs."""
    size = 1024 if device == "cpu" else 8192
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    torch.mm(a, b)
    best = min(seconds(lambda: torch.mm(a, b), 1, device) for _ in range(5))
    return 2 * size**3 / best / 1e12
