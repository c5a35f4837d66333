"""Runs the jobs within a time limit, and keeps a journal, so that a stopped run can resume."""

from __future__ import annotations

import dataclasses
import datetime
import json
import pathlib
import time
from collections.abc import Callable

import torch

import npu_ops
from npu_ops.core import compile_cache
from npu_ops_tools.verify import jobs, ranks, worker

QUICK = 300.0  # seconds of a quick run
LIMITS = {"npu-emulated": 300.0}  # seconds per job; a first compilation there takes a minute
LIMIT = 120.0
FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a verification.

    device: one of `jobs.DEVICES`.
    full: run all cases.
    only: names of ops; empty: all.
    limit: seconds until a job counts as hung; None: the device's default.
    budget: seconds for all jobs; None: QUICK, or no limit if `full`.
    modules: modules that each worker process imports, e.g. with your own implementation.
    """

    device: str = "npu"
    full: bool = False
    only: tuple[str, ...] = ()
    limit: float | None = None
    budget: float | None = None
    modules: tuple[str, ...] = ()


class Journal:
    """A file with a line for each event of a job, so that a stopped run can resume.

    A job that began, but neither finished nor was interrupted, has killed verify or stopped the
    machine. It counts as wrong and is not tried again.
    """

    def __init__(self, path: pathlib.Path, key: dict):
        self._path = path
        self.done: dict[str, dict] = {}
        begun = self._read(json.dumps(key))
        self._file = path.open("a" if begun is not None else "w")
        if begun is None:
            self._write(key)
        for name in begun or ():
            why = "interrupted: verify or the machine stopped during this check"
            self.finish(name, {"verdict": "wrong", "why": why, "ended": "stopped", "seconds": 0.0})

    def _read(self, key: str) -> set[str] | None:
        """Read the journal: results into `done`. Return the names of jobs that did not finish.

        None if the journal belongs to another run.
        """
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        if not lines or lines[0] != key:
            return None
        begun = set()
        for line in filter(_is_whole, lines[1:]):
            entry = json.loads(line)
            if entry["what"] == "begin":
                begun.add(entry["job"])
                continue
            begun.discard(entry["job"])
            if entry["what"] == "finish":
                self.done[entry["job"]] = entry["result"]
        return begun

    def begin(self, job: str) -> None:
        self._write({"what": "begin", "job": job})

    def interrupt(self, job: str) -> None:
        self._write({"what": "interrupt", "job": job})

    def finish(self, job: str, result: dict) -> None:
        self.done[job] = result
        self._write({"what": "finish", "job": job, "result": result})

    def _write(self, entry: dict) -> None:
        print(json.dumps(entry), file=self._file, flush=True)

    def close(self, remove: bool) -> None:
        self._file.close()
        if remove:
            self._path.unlink()


def _is_whole(line: str) -> bool:
    """Return whether a line is complete: the last one may be cut off."""
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def run(options: Options, output: pathlib.Path, say: Callable[[str], None]) -> dict:
    """Run all checks that fit the time limit; return the report for `report.write`.

    output: folder for the journal. say: called with each result as one line.

    Raises:
        ValueError: there is no such device or op.
        worker.NoWorker: nothing can be checked here.
    """
    plan = jobs.plan(options.device, options.full, list(options.only))
    device = worker.label(options.device)
    budget = options.budget or (None if options.full else QUICK)
    key = {
        "format": FORMAT, "device": device, "full": options.full, "only": sorted(options.only),
        "npu_ops": compile_cache.fingerprint(pathlib.Path(npu_ops.__file__).parent),
        "torch": torch.__version__,
    }  # fmt: skip
    output.mkdir(parents=True, exist_ok=True)
    journal = Journal(output / "verify.journal", key)
    one = _Run(options, device, journal, say, budget)
    try:
        results = one.through(plan)
    except BaseException:
        journal.close(remove=False)
        raise
    left = sum(result["verdict"] == "not reached" for result in results)
    journal.close(remove=not left)
    return {
        "format": FORMAT,
        "made": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "device": device,
        "mode": "full" if options.full else "quick",
        "environment": one.environment,
        "results": results,
    }


class _Run:
    """Runs the jobs of a plan, those of each op in one worker process."""

    def __init__(self, options: Options, device: str, journal: Journal, say, budget: float | None):
        self._options, self._device, self._journal, self._say = options, device, journal, say
        self._limit = options.limit or LIMITS.get(device, LIMIT)
        self._end = time.monotonic() + budget if budget else None
        self._variables = worker.variables_of(options.device)
        self.environment: dict = {}

    def through(self, plan: dict[str, list[jobs.Job]]) -> list[dict]:
        results = []
        for index, members in enumerate(plan.values()):
            left = len(plan) - index + 1  # one share of the time is for the ranks, which come last
            now = time.monotonic()
            until = now + (self._end - now) / left if self._end else None
            results += self._of_op(members, until)
        results.append(self._ranks())
        return [*results, self._microbenchmarks()] if self._options.full else results

    def _of_op(self, members: list[jobs.Job], until: float | None) -> list[dict]:
        mine = worker.Worker(self._options.device, list(self._options.modules), self._variables)
        try:
            if not self.environment:
                mine.start()
                self.environment = mine.environment
            # Run the first job without a result even if no time is left, so each run advances.
            first = next((job for job in members if job.name not in self._journal.done), None)
            return [self._one(mine, job, None if job is first else until) for job in members]
        finally:
            mine.stop()

    def _one(self, mine: worker.Worker, job: jobs.Job, until: float | None) -> dict:
        about = dataclasses.asdict(job) | {"name": job.name}
        late = until is not None and time.monotonic() > until
        return about | self._result(job.name, late, lambda: mine.do(job, self._limit))

    def _result(self, name: str, late: bool, do: Callable[[], dict]) -> dict:
        if name not in self._journal.done:
            if late:
                return {"verdict": "not reached", "why": "", "seconds": 0.0}
            self._journal.begin(name)
            try:
                result = do()
            except BaseException:
                self._journal.interrupt(name)
                raise
            self._journal.finish(name, result)
        result = self._journal.done[name]
        self._say(line(name, result))
        return result

    def _ranks(self) -> dict:
        """Check two ranks, if there are two devices; a CPU counts as any number."""
        kind, name = jobs.torch_device(self._device), "two ranks"
        machine = self.environment.get("machine", {})
        count = ranks.RANKS if kind == "cpu" else machine.get(f"{kind} devices") or 0
        about = {"kind": "ranks", "name": name}
        if count < ranks.RANKS:
            why = f"needs two {kind} devices, got {count}"
            return about | {"verdict": "declined", "why": why, "seconds": 0.0}
        modules, limit = list(self._options.modules), self._limit

        def do() -> dict:
            return ranks.run(self._options.device, modules, self._variables, limit)

        return about | self._result(name, False, do)

    def _microbenchmarks(self) -> dict:
        """Measure the times that `npu-ops model --calibrate` uses."""
        job = jobs.Job(jobs.MICROBENCHMARKS, "", "", "", "")
        about = {"kind": job.kind, "name": job.name}
        if self._device != "npu":
            why = f"npu-ops model predicts NPUs, and {self._device} has no times of an NPU"
            return about | {"verdict": "declined", "why": why, "seconds": 0.0}
        mine = worker.Worker(self._options.device, list(self._options.modules), self._variables)
        try:
            return about | self._result(job.name, False, lambda: mine.do(job, self._limit))
        finally:
            mine.stop()


def line(name: str, result: dict) -> str:
    """Format a result as text."""
    if result["verdict"] == "wrong":
        return f"WRONG: {name}: {result['why']}"
    why = f" ({result['why']})" if result["why"] else ""
    forward = result.get("times", {}).get("forward")
    time_ = f", {forward['p50']:.1f} us" if forward else ""
    return f"{result['verdict']:9}{name}{time_}{why}"
