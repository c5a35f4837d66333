"""The demo: trains real megatron-core models with and without npu-ops, and compares.

Both sides run the same program (`demo_model`) in two processes, one with NPU_OPS_DISABLE set. On an
NPU the other one has NPU_OPS_STRICT=1. There is no other difference: npu-ops registers itself.
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

from npu_ops_tools import demo_data, demo_model, doctor, report, where
from npu_ops_tools.bench import peers
from npu_ops_tools.bench.run import run as run_benchmarks

BATCH, LENGTH, DROPOUT = 4, 512, 0.1
VERSION = peers.MEGATRON.name
ALONE, OURS = "megatron-core alone", "with npu-ops"
MODELS = {"gpt": "GPT", "hybrid": "Gated Delta Net and attention 3:1"}
HYBRID = (
    "The hybrid model runs without flash-linear-attention: megatron-core alone computes in PyTorch "
    "(deterministic mode), with npu-ops it runs the functions of npu-ops."
)
TIMED = ["bias_dropout_add", "gdn_gate", "rms_norm_gated", "rope"]  # ops to benchmark
Run = tuple[str, float, int]  # model, dropout, seed
# Tolerance without dropout. Losses with and without npu-ops differ by fp32 rounding, which 30 steps
# of AdamW amplify.
EQUAL = 1e-4
# With dropout the masks differ, so final losses are compared by a t-test. It rejects equal
# distributions with this probability.
LEAST_P = 1e-3


@dataclasses.dataclass
class Check:
    """One check of the demo: its name, whether it passed, and the numbers compared."""

    name: str
    passed: bool
    detail: str


@dataclasses.dataclass
class Side:
    """The output of one of the two programs: losses per model and run, and its own summary.

    The first run of each model has no dropout.
    """

    losses: dict[str, list[list[float]]]
    end: dict


def run(
    output: pathlib.Path,
    megatron: pathlib.Path | None,
    device: str | None,
    steps: int,
    seeds: int,
    console: Console,
) -> bool:
    """Run everything and write output/index.html; return whether all checks passed.

    device: "cpu", "npu" or "npu-emulated"; None: an NPU if there is one, else the CPU.

    Raises:
        FileNotFoundError: megatron-core or a clone is missing.
        ImportError: another package is missing.
        RuntimeError: a training program failed.
    """
    where.clone()  # raises early: the benchmarks at the end need a clone
    folder = find_megatron(megatron)
    sys.path[:0] = [str(folder)] if folder else []
    console.rule("npu-ops doctor")
    found = doctor.collect()
    console.print(doctor.text(found), highlight=False, markup=False)
    device = device or ("npu" if found["machine"]["npu devices"] else "cpu")
    console.rule(f"training, device {device}")
    with prepared(folder, device, steps) as command:
        sides = train(command, device, steps, runs_of(seeds), console)
        checks = compare(*sides.values())
        if device == "npu-emulated":
            checks.append(two_ranks(command, steps, sides, console))
    for check in checks:
        mark = "[green]yes[/]" if check.passed else "[red]NO [/]"
        console.print(f"{mark} {check.name}: {check.detail}", highlight=False)
    if device == "cpu" and not found["machine"]["npu devices"]:
        console.print("No NPU here. To use an emulated NPU: npu-ops demo --device npu-emulated")
    console.rule("kernels, timed on the CPU")
    rows = list(run_benchmarks(TIMED, quick=True, only=[", forward, "], longest=0.5))
    path = report.write(output, rows, found=found, comparison=page(device, sides, checks))
    console.print(f"written: {path}")
    return all(check.passed for check in checks)


def find_megatron(folder: pathlib.Path | None) -> pathlib.Path | None:
    """Return the folder to put on the path; None if megatron-core is installed.

    Raises:
        FileNotFoundError: megatron-core was not found.
    """
    if folder is None and importlib.util.find_spec("megatron") is not None:
        return None
    chosen = folder or peers.MEGATRON
    if not (chosen / "megatron" / "core").is_dir():
        raise FileNotFoundError(
            f"megatron: got {chosen}, which has no megatron-core; give --megatron FOLDER, made by "
            f"pip install --no-deps --target FOLDER megatron-core=={VERSION}"
        )
    return chosen


def runs_of(seeds: int) -> list[Run]:
    """Return the runs: GPT without and with dropout, then the hybrid model without, if it can
    train."""
    runs = [("gpt", 0.0, 0), *(("gpt", DROPOUT, seed) for seed in range(seeds))]
    return runs if why_no_hybrid() else [*runs, ("hybrid", 0.0, 0)]


def why_no_hybrid() -> str | None:
    """Return None, or why the hybrid model cannot train."""
    package = importlib.util.find_spec("megatron")
    folders = map(pathlib.Path, package.submodule_search_locations)
    if not any(any(folder.glob("core/ssm/gated_delta_net*")) for folder in folders):
        return (
            "No hybrid model: this megatron-core has no Gated Delta Net; versions 0.16 to "
            "0.19 have it."
        )
    return None


@contextlib.contextmanager
def prepared(folder, device: str, steps: int) -> Iterator[Command]:
    """Write the training data to a file; yield the command that is common to all runs."""
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
    """How to start the training program: the command that starts Python, and Python's arguments."""

    python: list[str]
    arguments: list[str]

    def line(self, runs: list[Run], ranks: int = 1) -> list[str]:
        """Return the command line for these runs, with `ranks` tensor-parallel ranks."""
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        columns = ([str(value) for value in values] for values in zip(*runs, strict=True))
        models, dropouts, seeds = columns
        started = [*self.python, *(torchrun if ranks > 1 else []), *self.arguments]
        return [*started, "--models", *models, "--dropout", *dropouts, "--seeds", *seeds]


def train(command: Command, device: str, steps: int, runs: list[Run], console) -> dict[str, Side]:
    """Run both programs at the same time, each in a thread."""
    with progress(console) as bars:
        readers = {
            name: Reader(command.line(runs), switches, bars, name, len(runs) * steps)
            for name, switches in {ALONE: without(device), OURS: with_us(device)}.items()
        }
        return {name: reader.result() for name, reader in readers.items()}


def without(device: str) -> dict[str, str]:
    """Return the environment variables for training without npu-ops.

    On an NPU the jit_fuser patch stays, because Megatron's torch.compile fails there.
    """
    return {"NPU_OPS_DISABLE": "all" if device == "cpu" else ",".join(where.ops())}


def with_us(device: str) -> dict[str, str]:
    """Return the environment variables for training with npu-ops. On an NPU, a fallback fails."""
    return {"NPU_OPS_DISABLE": "", "NPU_OPS_STRICT": "0" if device == "cpu" else "1"}


def two_ranks(command: Command, steps: int, sides: dict[str, Side], console: Console) -> Check:
    """Check that tensor parallelism over two NPUs gives the losses of one."""
    line = command.line([("gpt", 0.0, 0)], ranks=2)
    with progress(console) as bars:
        reader = Reader(line, with_us("npu"), bars, "two ranks", steps)
        two = reader.result()
    worst = largest_difference(sides[OURS], two, "gpt")
    detail = f"losses differ by {worst:.1e} at most, allowed {EQUAL:.0e}"
    return Check("two tensor-parallel ranks equal one", worst <= EQUAL, detail)


def progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description:20}"), BarColumn(), MofNCompleteColumn(),
               TextColumn("steps, loss {task.fields[loss]}"), TimeRemainingColumn())  # fmt: skip
    return Progress(*columns, console=console)


class Reader(threading.Thread):
    """A thread that runs a training program and parses the JSON lines it prints."""

    def __init__(self, command: list[str], switches: dict, bars: Progress, name: str, steps: int):
        super().__init__(daemon=True)
        self._command, self._bars = command, bars
        self._task = bars.add_task(name, total=steps, loss="-")
        self._environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"} | switches
        self._losses: dict[str, dict[int, list[float]]] = {}
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
            self._failure = f"exit status {process.returncode}\n{errors.read()[-3000:]}"

    def _read(self, row: dict):
        if "end" in row:
            self._end = row["end"]
            return
        runs = self._losses.setdefault(row["model"], {})
        runs.setdefault(row["run"], []).append(row["loss"])
        self._bars.update(self._task, advance=1, loss=f"{row['loss']:.3f}")

    def result(self) -> Side:
        """Wait for the program, and return its output. Raises RuntimeError if it failed."""
        self.join()
        if self._end is None:
            raise RuntimeError(f"training failed: {self._failure}")
        return Side({model: list(r.values()) for model, r in self._losses.items()}, self._end)


def compare(alone: Side, ours: Side) -> list[Check]:
    """Compare training without npu-ops (`alone`) and with it (`ours`)."""
    checks = [took_part(alone, ours), decreases(alone, ours)]
    checks += [equal(alone, ours, model) for model in alone.losses]
    return [*checks, alike(alone, ours)]


def took_part(alone: Side, ours: Side) -> Check:
    """Check that npu-ops ran in `ours` only; otherwise Megatron is compared with itself."""
    applied = [row["state"] == "applied" for row in ours.end["patches"]]
    without, calls = (
        [sum(operators.values()) for operators in side.end["operators"].values()]
        for side in (alone, ours)
    )
    passed = bool(applied) and all(applied) and not any(without) and all(calls)
    counts = " and ".join(map(str, calls))
    detail = (
        f"{len(applied)} replacements; {counts} operator calls per step, {sum(without)} "
        "without npu-ops"
    )
    return Check("npu-ops ran in one of the two trainings only", passed, detail)


def decreases(alone: Side, ours: Side) -> Check:
    """Check that the mean of the last five losses is below that of the first five, in every run."""
    drops = [
        statistics.mean(losses[:5]) - statistics.mean(losses[-5:])
        for side in (alone, ours)
        for runs in side.losses.values()
        for losses in runs
    ]
    return Check("the loss decreases in every run", min(drops) > 0, f"by {min(drops):.2f} at least")


def equal(alone: Side, ours: Side, model: str) -> Check:
    """Check that the losses with and without npu-ops are equal if there is no dropout."""
    worst = largest_difference(alone, ours, model)
    detail = f"losses differ by {worst:.1e} at most, allowed {EQUAL:.0e}"
    return Check(f"equal without dropout: {MODELS[model]}", worst <= EQUAL, detail)


def largest_difference(one: Side, other: Side, model: str) -> float:
    """Return the largest difference of the losses in a model's first run, which has no dropout."""
    first = (side.losses[model][0] for side in (one, other))
    return max(abs(a - b) for a, b in zip(*first, strict=True))


def alike(alone: Side, ours: Side) -> Check:
    """Check that the seeds' final losses with dropout could come from one distribution."""
    from scipy import stats

    ends = [[statistics.mean(run[-5:]) for run in side.losses["gpt"][1:]] for side in (alone, ours)]
    p = stats.ttest_ind(*ends, equal_var=False).pvalue
    shown = " and ".join(
        f"{statistics.mean(end):.3f} \u00b1 {statistics.stdev(end):.3f}" for end in ends
    )
    detail = f"final losses {shown}, Welch's t-test p = {p:.2f}, at least {LEAST_P}"
    return Check(f"alike with dropout {DROPOUT}", bool(p >= LEAST_P), detail)


def page(device: str, sides: dict[str, Side], checks: list[Check]) -> dict:
    """Return the data of the report's training section."""
    end = sides[OURS].end
    titles = {
        ("gpt", 0): "GPT, no dropout",
        ("gpt", 1): f"GPT, dropout {DROPOUT}, first seed",
        ("hybrid", 0): "Gated Delta Net and attention 3:1, no dropout",
    }
    return {
        "megatron": end["megatron"],
        "model": (
            f"Device {device}. GPTModel with multimodal rotary embedding: GPT, "
            f"{end['layers']['gpt']} layers of attention, and a hybrid of {end['layers']['hybrid']}"
            " layers. Text and pictures of scikit-learn as "
            f"{BATCH} x {LENGTH} tokens per step. " + (why_no_hybrid() or HYBRID)
        ),
        "checks": checks,
        "curves": [
            report.curves({name: side.losses[model][run] for name, side in sides.items()}, title)
            for (model, run), title in titles.items()
            if model in end["operators"]
        ],
    }
