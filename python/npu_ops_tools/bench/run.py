"""Runs benchmarks and makes rows of their results."""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Iterator

import torch

from npu_ops.core import env
from npu_ops_tools.bench import rows, timing
from npu_ops_tools.bench.rows import Row
from npu_ops_tools.bench.sweep import Benchmark, Sweep, discover, load
from npu_ops_tools.bench.work import Work


def run(ops=None, quick=False, device="cpu", only=(), longest=60.0):
    """Yield the rows of the benchmarks of `ops` (None: all) as soon as they are measured.

    quick: two sizes of one model.
    only: run the benchmarks whose names contain all of these strings.
    longest: seconds for each benchmark that does not become stable.

    Raises:
        AssertionError: npu-ops' result differs from the reference.
        ValueError: there is no such op, or no benchmark's name matches.
    """
    none = True
    for path in discover(ops).values():
        for sweep in load(path):
            chosen = [
                b for b in sweep.benchmarks(quick) if all(part in b.name for part in only or ())
            ]
            none &= not chosen
            for benchmark in chosen:
                yield from measure(benchmark, device, longest)
            if chosen and not only:
                yield from absent(sweep, device)
        torch._dynamo.reset()
    if none:
        raise ValueError(f"only: got {only}, which is in no benchmark's name")


def measure(benchmark: Benchmark, device: str, longest: float) -> Iterator[Row]:
    """Measure a benchmark; yield a row for each provider."""
    work = Work(benchmark, device)
    errors = work.errors()
    peaks = {name: timing.peak_mb(call, device) for name, call in work.calls.items()}
    copy = timing.copy_of(work.moved, device)
    times = timing.interleaved(work.calls | {"copy": copy}, device, longest)
    copied = times.pop("copy").percentile(50)
    for name, found in times.items():
        low, high = found.interval()
        yield _row(
            benchmark.sweep, device,
            shape=benchmark.shape, size=benchmark.size, mode=benchmark.mode,
            dtype=str(benchmark.dtype).removeprefix("torch."), provider=name,
            implementation=work.implementations.get(name, ""),
            state="stable" if found.stable() else "unstable",
            ms_p20=found.percentile(20) * 1e3, ms_p50=found.percentile(50) * 1e3,
            ms_p80=found.percentile(80) * 1e3, ms_low=low * 1e3, ms_high=high * 1e3,
            runs=len(found.seconds), calls=found.calls, bytes=work.moved, flop=work.flop,
            copy_gbps=work.moved / copied / 1e9,
            matmul_tflops=timing.matmul_tflops(benchmark.dtype, device) if work.flop else None,
            peak_mb=peaks[name], error=errors.get(name),
            error_against=work.against() if name in errors else "",
            command=_command(benchmark.op, device, "--only", benchmark.name),
        )  # fmt: skip


def absent(sweep: Sweep, device: str) -> Iterator[Row]:
    """Yield a row for each peer that is not available, and for each that `at_most` limits."""
    for name, why in sweep.found()[1].items():
        yield _row(sweep, device, shape=sweep.label, provider=name, state="absent", note=why)
    for name, most in sweep.at_most.items():
        why = f"beyond {most} {sweep.unit} it takes minutes or all memory; timed up to that size"
        yield _row(sweep, device, shape=sweep.label, provider=name, state="absent", note=why)


def _command(op: str, device: str, *options: str) -> str:
    """Return the command that repeats a row, with the NPU_OPS_IMPL that was set."""
    forced = ",".join("=".join(pair) for pair in env.settings.impl.items())
    switch = f"NPU_OPS_IMPL={forced} " if forced else ""
    there = [] if device == "cpu" else ["--device", device]
    return switch + shlex.join(["npu-ops", "bench", op, *options, *there])


def _row(sweep: Sweep, device: str, **values) -> Row:
    commit, dirty = rows.commit()
    numbers = dict.fromkeys(rows.FIELDS)
    texts = {"mode": "", "dtype": "", "implementation": "", "note": "", "error_against": ""}
    now = datetime.datetime.now(datetime.timezone.utc)
    same = {
        "op": sweep.op,
        "size": 0,
        "unit": sweep.unit,
        "device": rows.device_name(device),
        "machine": rows.machine(device),
        "threads": torch.get_num_threads(),
        "versions": rows.versions(),
        "commit": commit,
        "dirty": dirty,
        "timestamp": now.isoformat(timespec="seconds"),
        "command": _command(sweep.op, device),
    }
    return Row(**numbers | texts | same | values)
