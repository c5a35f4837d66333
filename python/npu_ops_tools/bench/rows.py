"""Reads and writes rows of benchmark results: benchmarks/results/<device>/<op>.csv."""

from __future__ import annotations

import csv
import dataclasses
import functools
import pathlib
import subprocess
import typing
from collections.abc import Iterable

import npu_ops_emulator
import torch

import npu_ops
from npu_ops.core import hardware
from npu_ops_tools import where

STATES = ("stable", "unstable", "absent")


@dataclasses.dataclass(frozen=True)
class Row:
    """The result of one provider in one benchmark.

    shape: the models and ranks whose layers have this shape.
    size, unit: number of tokens or sequences.
    implementation: the implementation of npu-ops that ran.
    state: "stable": the 95 % interval of the median is within 5 % of it; "unstable"; or "absent":
    no numbers, and `note` says why.
    ms_p20, ms_p50, ms_p80: milliseconds per call; ms_low, ms_high: 95 % interval of
    ms_p50.
    runs: number of measurements, each the mean of `calls` calls.
    bytes, flop: lower bounds of the bytes to move and the operations to compute.
    copy_gbps: rate of a copy of as many bytes, timed alternately with the calls.
    matmul_tflops: rate of a matrix product in the same dtype, in the same run.
    peak_mb: peak memory that a call allocates beyond its inputs, in MB; on CPUs in MiB.
    error: RMS of the error over RMS of the result.
    command: command that repeats the measurement.
    """

    op: str
    shape: str
    size: int
    unit: str
    mode: str
    dtype: str
    provider: str
    implementation: str
    state: str
    note: str
    ms_p20: float | None
    ms_p50: float | None
    ms_p80: float | None
    ms_low: float | None
    ms_high: float | None
    runs: int | None
    calls: int | None
    bytes: int | None
    flop: int | None
    copy_gbps: float | None
    matmul_tflops: float | None
    peak_mb: float | None
    error: float | None
    error_against: str
    device: str
    machine: str
    threads: int
    versions: str
    commit: str
    dirty: bool
    timestamp: str
    command: str

    @property
    def benchmark(self) -> tuple:
        """The values that identify the benchmark and the machine; all its providers share them."""
        return tuple(getattr(self, name) for name in _BENCHMARK)

    @property
    def key(self) -> tuple:
        """The unique key of a row."""
        return (*self.benchmark, self.provider)

    @property
    def name(self) -> str:
        """A description of the benchmark."""
        return f"{self.op}: {self.shape}, {self.size} {self.unit}, {self.mode}, {self.dtype}"

    @property
    def gbps(self) -> float | None:
        return self.bytes / self.ms_p50 / 1e6 if self.ms_p50 and self.bytes else None

    @property
    def tflops(self) -> float | None:
        return self.flop / self.ms_p50 / 1e9 if self.ms_p50 and self.flop else None


_BENCHMARK = ("device", "machine", "threads", "op", "shape", "size", "mode", "dtype")
FIELDS = tuple(field.name for field in dataclasses.fields(Row))
_TYPES = typing.get_type_hints(Row)


def read(path: pathlib.Path) -> list[Row]:
    """Read the rows of a file, or of all files in a folder.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file has other columns.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    files = sorted(path.glob("**/*.csv")) if path.is_dir() else [path]
    if not files:
        raise FileNotFoundError(f"{path}: no CSV in it")
    return [row for file in files for row in _read(file)]


def _read(path: pathlib.Path) -> list[Row]:
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        found = list(reader)
    missing = set(FIELDS) - set(reader.fieldnames or ())
    if missing:
        raise ValueError(f"{path}: got no column {', '.join(sorted(missing))}, needs a bench CSV")
    return [Row(**{name: _parsed(row[name], _TYPES[name]) for name in FIELDS}) for row in found]


def _parsed(text: str, kind):
    if kind is str:
        return text
    if kind is bool:
        return text == "True"
    if not text:
        return None
    return int(text) if kind in (int, int | None) else float(text)


def upsert(rows: Iterable[Row], folder: pathlib.Path) -> list[pathlib.Path]:
    """Write rows to <device>/<op>.csv. A row with the same key is replaced; other rows stay."""
    by_file: dict[pathlib.Path, list[Row]] = {}
    for row in rows:
        by_file.setdefault(folder / row.device / f"{row.op}.csv", []).append(row)
    for path, new in by_file.items():
        kept = _read(path) if path.exists() else []
        merged = {row.key: row for row in [*kept, *new]}
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(map(_written, merged.values()))
    return list(by_file)


def _written(row: Row) -> dict:
    """Return a row's values with four significant digits; times are not more precise."""
    values = dataclasses.asdict(row)
    return {n: f"{x:.4g}" if isinstance(x, float) else x for n, x in values.items()}


# Provenance of a row


@functools.cache
def commit() -> tuple[str, bool]:
    """Return the clone's commit (12 digits), and True if files outside benchmarks/results changed.

    A package that does not run from a clone returns ("", True).
    """
    if where.find_clone() != where.ROOT:
        return "", True

    def git(*arguments):
        command = ["git", "-C", str(where.ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    return git("rev-parse", "--short=12", "HEAD"), bool(changed)


def device_name(device: str) -> str:
    """Return a device name for rows. Numbers of "npu-emulated" are not times of an NPU."""
    kind = torch.device(device).type
    return "npu-emulated" if kind == "npu" and npu_ops_emulator.installed() else kind


@functools.cache
def machine(device: str) -> str:
    """Return the name of the processor or the accelerator."""
    kind = torch.device(device).type
    return hardware.processor() if kind == "cpu" else getattr(torch, kind).get_device_name(device)


@functools.cache
def versions() -> str:
    """Return the versions of the packages that affect the numbers."""
    import importlib.metadata as metadata

    found = [f"npu-ops {npu_ops.__version__}", f"torch {torch.__version__}"]
    for name in ("transformers", "torch_npu", "triton", "triton-ascend"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)
