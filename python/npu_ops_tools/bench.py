"""Benchmarks: time the providers of an op against each other, in one run, and keep the rows.

What is timed is in benchmarks/bench_<op>.py. A provider that claims to be ours is compared with the
reference first; one that is wrong is not timed.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import functools
import importlib.util
import json
import pathlib
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch

import npu_ops
from npu_ops.core import cases, env
from npu_ops.core.compare import error_ratio

FIELDS = (
    "op", "impl", "mode", "case", "dtype", "shape_json", "ms_p50", "ms_p20", "ms_p80", "gbps",
    "peak_mb", "ref_impl", "speedup", "err_ratio", "device", "threads", "torch", "npu_ops", "git",
    "timestamp", "repro",
)  # fmt: skip

# Of one benchmark, in seconds and turns.
LONGEST, FEWEST = 30.0, 3


@dataclasses.dataclass
class Benchmark:
    """One case of one op: the same work done by each provider.

    providers: name -> a function that does it and returns its results.
    baseline: the provider that speed-ups are against.
    expected: what npu-ops must return from the same random seed; None where it returns no tensors.
    moved: bytes that must be read or written at the least; gives GB/s.
    """

    op: str
    case: str
    mode: str
    dtype: torch.dtype
    shape: dict
    providers: dict[str, Callable[[], tuple[torch.Tensor, ...]]]
    baseline: str
    moved: int
    expected: Callable[[], tuple[torch.Tensor, ...]] | None = None
    tolerance: float = 0.0


def discover(ops: list[str] | None = None) -> dict[str, pathlib.Path]:
    """The benchmark file of each op, in the repository that this package is run from."""
    folder = pathlib.Path(npu_ops.__file__).parent.parent / "benchmarks"
    files = {path.stem.removeprefix("bench_"): path for path in sorted(folder.glob("bench_*.py"))}
    if not files:
        raise FileNotFoundError(f"{folder} has no benchmarks; run from a clone of the repository")
    unknown = set(ops or ()) - set(files)
    if unknown:
        raise ValueError(f"ops: got {sorted(unknown)}, needs some of {sorted(files)}")
    return {op: path for op, path in files.items() if not ops or op in ops}


def load(path: pathlib.Path) -> Callable[..., Iterator[Benchmark]]:
    """The `benchmarks(device, quick)` function of a benchmark file."""
    _leave_frameworks_alone()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.benchmarks


def _leave_frameworks_alone() -> None:
    """A baseline is a framework's own function, not what the adapters put in its place."""
    if "npu_ops_adapters" in sys.modules:
        sys.modules["npu_ops_adapters"].revert()
    if "npu_ops_autoload" in sys.modules:
        sys.modules["npu_ops_autoload"].unwatch()


def run(ops=None, quick: bool = False, device: str = "cpu", report=lambda row: None) -> list[dict]:
    """Time the benchmarks of `ops` (all) and return a row of FIELDS for each provider.

    quick: few small cases. report: called with each row as it is made.

    Raises:
        AssertionError: npu-ops computes something else than the reference.
    """
    rows = []
    for path in discover(ops).values():
        for benchmark in load(path)(device, quick):
            seconds, turns = (0.3, 5) if quick else (4.0, 15)
            for row in measure(benchmark, device, seconds, turns):
                rows.append(row)
                report(row)
    return rows


def measure(benchmark: Benchmark, device: str, seconds: float, turns: int = 5) -> list[dict]:
    """Time every provider of one benchmark, turn by turn, so that all see the same noise.

    For so many seconds and turns at least, or LONGEST and FEWEST. What a virtual machine has not
    used for a while is slow to touch, so each provider runs a few times before.
    """
    error = check(benchmark)
    times = {name: [] for name in benchmark.providers}
    peaks = {name: peak_mb(run) for name, run in benchmark.providers.items()}
    repeats = {name: _repeats(run, device) for name, run in benchmark.providers.items()}
    start = time.perf_counter()
    while _goes_on(time.perf_counter() - start, len(times[benchmark.baseline]), seconds, turns):
        for name, run in benchmark.providers.items():
            times[name].append(_time(run, repeats[name], device))
    baseline = _percentile(times[benchmark.baseline], 50)
    return [
        _row(benchmark, name, times[name], peaks[name], baseline, device, error)
        for name in benchmark.providers
    ]


def _goes_on(spent: float, turn: int, seconds: float, turns: int) -> bool:
    if spent > LONGEST:
        return turn < FEWEST
    return spent < seconds or turn < turns


def check(benchmark: Benchmark) -> float | None:
    """The error of npu-ops against what is expected; AssertionError beyond the tolerance."""
    if benchmark.expected is None:
        return None
    torch.manual_seed(0)
    actual = benchmark.providers["npu_ops"]()
    torch.manual_seed(0)
    expected = benchmark.expected()
    error = max(error_ratio(a, e) for a, e in zip(actual, expected, strict=True))
    if not error <= benchmark.tolerance:
        raise AssertionError(
            f"{benchmark.op} {benchmark.case} {benchmark.mode}: error ratio {error:.2e}, needs "
            f"{benchmark.tolerance:.0e} before it is timed"
        )
    return error


def by_reference(op: str, run: Callable):
    """What `run` returns where the reference implements `op`."""
    with env.override(impl={op: "reference"}):
        return run()


def of_cases(op: str, names: Sequence[str], eager: Callable, device: str, quick: bool):
    """Yield benchmarks of cases by name, forward and with gradients, against `eager`, a function of
    what the op is differentiable in, and torch.compile of it."""
    known = {case.name: case for case in cases.of(op).CASES}
    for case in map(known.get, names):
        for dtype in (torch.bfloat16, torch.float32):
            for mode in ("forward", "forward+backward"):
                yield _of_case(op, case, mode, eager, dtype, device, quick)


def _of_case(op, case, mode, eager, dtype, device, quick) -> Benchmark:
    inputs, backward = case.inputs(dtype, device), mode != "forward"
    leaves = {n: inputs[n].requires_grad_(backward) for n in cases.differentiable(op, case)}
    rest = {name: value for name, value in inputs.items() if name not in leaves}
    functions = {"npu_ops": lambda *xs: _named(cases.function(op, case), leaves, xs, rest)}
    functions |= {"eager": eager} if quick else {"eager": eager, "compile": torch.compile(eager)}
    grad = eager(*leaves.values()).detach()

    def once(function, *xs):
        out = function(*xs)
        return torch.autograd.grad(out, xs, grad) if backward else (out,)

    xs, wide = list(leaves.values()), [x.detach().double() for x in leaves.values()]
    run = {name: functools.partial(once, f, *xs) for name, f in functions.items()}
    run["memcpy"] = lambda: tuple(x.detach().clone() for x in xs)
    moved = sum(x.nbytes for x in xs) * (2 if backward else 1) + grad.nbytes
    shape = {name: list(x.shape) for name, x in leaves.items()}
    return Benchmark(
        op, case.name, mode, dtype, shape, run, "eager", moved,
        lambda: once(eager, *(x.requires_grad_(backward) for x in wide)),
        cases.of(op).TOLERANCES[dtype].ratio,
    )  # fmt: skip


def _named(function, leaves: dict, xs, rest: dict):
    return function(**dict(zip(leaves, xs, strict=True)), **rest)


def into(*sources: torch.Tensor) -> Callable[[], None]:
    """Copies to memory that is there already: what a kernel cannot beat that moves as much."""
    copies = [source.detach().clone() for source in sources]

    def copy():
        for to, source in zip(copies, sources, strict=True):
            to.copy_(source)

    return copy


def peak_mb(run) -> float | None:
    """The most memory that a call needs beyond what was there before it; None where unknown."""
    status = pathlib.Path("/proc/self/status")
    if not status.exists():
        return None
    run()  # warm up: what is allocated once does not count
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = _status_kb(status, "VmRSS")
    result = run()
    peak = _status_kb(status, "VmHWM")
    del result
    return max(0.0, (peak - before) / 1024)


def _status_kb(status: pathlib.Path, field: str) -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1])


def _repeats(run, device: str) -> int:
    """How often to repeat a call so that the clock's resolution does not matter."""
    return max(1, min(1000, int(0.002 / max(_time(run, 1, device), 1e-6))))


def _time(run, repeats: int, device: str) -> float:
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    _synchronize(device)
    return (time.perf_counter() - start) / repeats


def _synchronize(device: str) -> None:
    if device != "cpu":
        getattr(torch, torch.device(device).type).synchronize()


def _percentile(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


def _row(benchmark, name, times, peak, baseline, device, error) -> dict:
    middle = _percentile(times, 50)
    return {
        "op": benchmark.op,
        "impl": name,
        "mode": benchmark.mode,
        "case": benchmark.case,
        "dtype": str(benchmark.dtype).removeprefix("torch."),
        "shape_json": json.dumps(benchmark.shape),
        "ms_p50": f"{middle * 1e3:.4f}",
        "ms_p20": f"{_percentile(times, 20) * 1e3:.4f}",
        "ms_p80": f"{_percentile(times, 80) * 1e3:.4f}",
        "gbps": f"{benchmark.moved / middle / 1e9:.2f}",
        "peak_mb": "" if peak is None else f"{peak:.1f}",
        "ref_impl": benchmark.baseline,
        "speedup": f"{baseline / middle:.3f}",
        "err_ratio": "" if error is None or name != "npu_ops" else f"{error:.2e}",
        "device": torch.device(device).type,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "npu_ops": npu_ops.__version__,
        "git": _git(),
        "timestamp": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "repro": shlex.join(["npu-ops", *sys.argv[1:]]),
    }


def _git() -> str:
    result = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=pathlib.Path(npu_ops.__file__).parent,
        capture_output=True,
        text=True,
    )
    return result.stdout.strip()


def write(rows: list[dict], folder: pathlib.Path) -> pathlib.Path:
    """Write rows to <device>.csv; devices never share a file."""
    path = folder / f"{rows[0]['device']}.csv"
    folder.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)
    return path
