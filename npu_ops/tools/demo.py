"""The demo: a real megatron-core model trained without and with npu-ops, and what differs.

The two sides are two processes of the same program (`demo_model`), one with NPU_OPS_DISABLE set.
Nothing else tells them apart: npu-ops registers itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from npu_ops.tools import bench, demo_data, demo_model, doctor, report, where

BATCH, LENGTH, DROPOUT = 4, 512, 0.1
VERSION = "0.16.1"
ALONE, OURS = "megatron-core alone", "with npu-ops"
# Without dropout the sides differ by rounding in fp32, which 30 steps of AdamW enlarge.
EQUAL = 1e-4
# With dropout the masks differ. A fair test calls equal things different once in so many times.
LEAST_P = 1e-3


@dataclasses.dataclass
class Check:
    """One thing that the demo shows, and whether it held."""

    name: str
    passed: bool
    detail: str


@dataclasses.dataclass
class Side:
    """One of the two programs: a list of losses for each run, and what it says of itself."""

    losses: list[list[float]]
    end: dict


def run(
    output: pathlib.Path,
    megatron: pathlib.Path | None,
    device: str | None,
    steps: int,
    seeds: int,
    console: Console,
) -> bool:
    """Do all of it and write output/index.html; whether everything held.

    device: "cpu", "npu" or "npu-emulated"; None: an NPU if there is one, else the CPU.

    Raises:
        FileNotFoundError: megatron-core is not there. ImportError: another package is missing.
        RuntimeError: a training program failed.
    """
    folder = find_megatron(megatron)
    sys.path[:0] = [str(folder)] if folder else []
    console.rule("npu-ops doctor")
    found = doctor.collect()
    doctor.show(found, console)
    device = device or ("npu" if found["machine"]["npu devices"] else "cpu")
    console.rule(f"training, device {device}")
    with prepared(folder, device, steps) as command:
        sides = train(command, device, steps, seeds, console)
        checks = compare(*sides.values())
        if device == "npu-emulated":
            checks.append(two_ranks(command, steps, sides, console))
    for check in checks:
        mark = "[green]yes[/]" if check.passed else "[red]NO [/]"
        console.print(f"{mark} {check.name}: {check.detail}", highlight=False)
    if device == "cpu" and not found["machine"]["npu devices"]:
        console.print("No NPU here. On an emulated one: npu-ops demo --device npu-emulated")
    console.rule("kernels, timed on the CPU")
    timings = [report.Timings("measured now, decode sizes", bench.run(quick=True))]
    timings += [report.read_timings(path) for path in sorted(committed().glob("*.csv"))]
    path = report.write(
        output, found=found, timings=timings, comparison=page(device, sides, checks)
    )
    console.print(f"written: {path}")
    return all(check.passed for check in checks)


def committed() -> pathlib.Path:
    """The results that come with a clone."""
    return where.ROOT / "benchmarks" / "results"


def find_megatron(folder: pathlib.Path | None) -> pathlib.Path | None:
    """The folder to put on the path, None if megatron-core is installed.

    Raises:
        FileNotFoundError: it is nowhere.
    """
    if folder is None and importlib.util.find_spec("megatron") is not None:
        return None
    chosen = folder or where.ROOT / ".cache" / "megatron" / VERSION
    if not (chosen / "megatron" / "core").is_dir():
        raise FileNotFoundError(
            f"megatron: got {chosen}, which has no megatron-core; give --megatron FOLDER, made by "
            f"pip install --no-deps --target FOLDER megatron-core=={VERSION}"
        )
    return chosen


@contextlib.contextmanager
def prepared(folder, device: str, steps: int) -> Iterator[Command]:
    """The training program and its data, without what tells one run from another."""
    with tempfile.TemporaryDirectory() as scratch:
        data = pathlib.Path(scratch) / "batches.pt"
        batches = demo_data.batches(steps, BATCH, LENGTH)
        torch.save(batches | {"vocabulary": demo_data.VOCABULARY}, data)
        arguments = [demo_model.__file__, str(data), "--device", device.partition("-")[0]]
        arguments += ["--megatron", str(folder)] if folder else []
        emulated = ["npu_ops_emulator", "--devices", "2", "--", sys.executable]
        yield Command([sys.executable, *(["-m", *emulated] if "-" in device else [])], arguments)


@dataclasses.dataclass
class Command:
    """How to start the training program: what starts Python, and Python's arguments."""

    python: list[str]
    arguments: list[str]

    def line(self, runs: list[tuple[float, int]], ranks: int = 1) -> list[str]:
        """The command line for (dropout, seed) of each run, with so many tensor-parallel ranks."""
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        dropouts, seeds = ([str(value) for value in values] for values in zip(*runs, strict=True))
        started = [*self.python, *(torchrun if ranks > 1 else []), *self.arguments]
        return [*started, "--dropout", *dropouts, "--seeds", *seeds]


def train(command: Command, device: str, steps: int, seeds: int, console) -> dict[str, Side]:
    """Run both programs at the same time, a thread each."""
    plan = [(0.0, 0), *((DROPOUT, seed) for seed in range(seeds))]
    with progress(console) as bars:
        readers = {
            name: Reader(command.line(plan), switches, bars, name, len(plan) * steps)
            for name, switches in {ALONE: without(device), OURS: with_us(device)}.items()
        }
        return {name: reader.result() for name, reader in readers.items()}


def without(device: str) -> dict[str, str]:
    """Megatron alone; on an NPU without its torch.compile, which it does not get past there."""
    return {"NPU_OPS_DISABLE": "all" if device == "cpu" else ",".join(where.ops())}


def with_us(device: str) -> dict[str, str]:
    """On an NPU: our kernels, or an error."""
    return {"NPU_OPS_DISABLE": "", "NPU_OPS_STRICT": "0" if device == "cpu" else "1"}


def two_ranks(command: Command, steps: int, sides: dict[str, Side], console: Console) -> Check:
    """Tensor parallelism over two NPUs computes what one does."""
    line = command.line([(0.0, 0)], ranks=2)
    with progress(console) as bars:
        reader = Reader(line, with_us("npu"), bars, "two ranks", steps)
        two = reader.result()
    worst = largest_difference(sides[OURS], two)
    detail = f"losses differ by {worst:.1e} at most, allowed {EQUAL:.0e}"
    return Check("two tensor-parallel ranks equal one", worst <= EQUAL, detail)


def progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description:20}"), BarColumn(), MofNCompleteColumn(),
               TextColumn("steps, loss {task.fields[loss]}"), TimeRemainingColumn())  # fmt: skip
    return Progress(*columns, console=console)


class Reader(threading.Thread):
    """Runs a training program and follows the JSON lines that it prints."""

    def __init__(self, command: list[str], switches: dict, bars: Progress, name: str, steps: int):
        super().__init__(daemon=True)
        self._command, self._bars = command, bars
        self._task = bars.add_task(name, total=steps, loss="-")
        self._environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"} | switches
        self._losses: dict[int, list[float]] = {}
        self._end = None
        self.start()

    def run(self):
        with tempfile.TemporaryFile("w+") as errors:
            pipe = {"stdout": subprocess.PIPE, "stderr": errors, "text": True}
            with subprocess.Popen(self._command, env=self._environment, **pipe) as process:
                for line in process.stdout:
                    if line.startswith("{"):
                        self._read(json.loads(line))
            errors.seek(0)
            self._failure = f"it ended with {process.returncode}\n{errors.read()[-3000:]}"

    def _read(self, row: dict):
        if "end" in row:
            self._end = row["end"]
            return
        self._losses.setdefault(row["run"], []).append(row["loss"])
        self._bars.update(self._task, advance=1, loss=f"{row['loss']:.3f}")

    def result(self) -> Side:
        """Wait for the program. RuntimeError: it failed."""
        self.join()
        if self._end is None:
            raise RuntimeError(f"training failed: {self._failure}")
        return Side(list(self._losses.values()), self._end)


def compare(alone: Side, ours: Side) -> list[Check]:
    """What must hold between the two sides."""
    return [took_part(alone, ours), decreases(alone, ours), equal(alone, ours), alike(alone, ours)]


def took_part(alone: Side, ours: Side) -> Check:
    """Or the comparison would be of Megatron with itself."""
    applied = [row["state"] == "applied" for row in ours.end["patches"]]
    calls = [sum(side.end["operators"].values()) for side in (alone, ours)]
    passed = bool(applied) and all(applied) and calls[0] == 0 < calls[1]
    detail = f"{len(applied)} replacements; {calls[1]} operator calls a step, {calls[0]} without"
    return Check("npu-ops took part on one side only", passed, detail)


def decreases(alone: Side, ours: Side) -> Check:
    """The last five losses against the first five, in every run."""
    drops = [
        statistics.mean(losses[:5]) - statistics.mean(losses[-5:])
        for side in (alone, ours)
        for losses in side.losses
    ]
    return Check("the loss decreases in every run", min(drops) > 0, f"by {min(drops):.2f} at least")


def equal(alone: Side, ours: Side) -> Check:
    """Without dropout the sides compute the same."""
    worst = largest_difference(alone, ours)
    detail = f"losses differ by {worst:.1e} at most, allowed {EQUAL:.0e}"
    return Check("equal without dropout", worst <= EQUAL, detail)


def largest_difference(one: Side, other: Side) -> float:
    """Between the losses of the first run, which has no dropout."""
    return max(abs(a - b) for a, b in zip(one.losses[0], other.losses[0], strict=True))


def alike(alone: Side, ours: Side) -> Check:
    """With dropout the final losses of the seeds could come from one distribution."""
    from scipy import stats

    ends = [[statistics.mean(run[-5:]) for run in side.losses[1:]] for side in (alone, ours)]
    p = stats.ttest_ind(*ends, equal_var=False).pvalue
    shown = " and ".join(
        f"{statistics.mean(end):.3f} \u00b1 {statistics.stdev(end):.3f}" for end in ends
    )
    detail = f"final losses {shown}, Welch's t-test p = {p:.2f}, at least {LEAST_P}"
    return Check(f"alike with dropout {DROPOUT}", bool(p >= LEAST_P), detail)


def page(device: str, sides: dict[str, Side], checks: list[Check]) -> dict:
    """What the report shows of the training."""
    end = sides[OURS].end
    titles = {0: "no dropout", 1: f"dropout {DROPOUT}, first seed"}
    return {
        "megatron": end["megatron"],
        "model": (
            f"Device {device}. GPTModel, {end['layers']} layers, multimodal rotary embedding; text "
            f"and pictures of scikit-learn as {BATCH} x {LENGTH} tokens a step."
        ),
        "checks": checks,
        "curves": [
            report.curves({name: side.losses[run] for name, side in sides.items()}, title)
            for run, title in titles.items()
        ],
    }
