"""Run the same tests several times, once without npu-ops, and compare the outcomes."""

from __future__ import annotations

import collections
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import counting

OUTCOMES = ("passed", "failed", "skipped")


class Record:
    """A pytest plugin that records each test's outcome, and the calls of npu_ops."""

    def __init__(self, operators):
        self.tests = {}
        self._operators = operators
        self.calls = collections.Counter()
        self._file = None

    def pytest_runtest_logstart(self, nodeid, location):
        self._file = nodeid.partition("::")[0]

    def pytest_runtest_logreport(self, report):
        passed_so_far = self.tests.get(report.nodeid, ("passed",))[0] == "passed"
        if passed_so_far and (report.when == "call" or not report.passed):
            self.tests[report.nodeid] = (report.outcome, reason(report))

    def pytest_collectreport(self, report):
        if not report.passed:
            self.tests[report.nodeid] = (report.outcome, reason(report))

    def report(self) -> dict:
        return {"tests": self.tests, "calls": self.calls}

    def count_calls(self) -> None:
        counting.on_calls(self._operators, lambda name: self.calls.update([self._file]))


def run(
    script: str,
    name: str,
    checkout: pathlib.Path,
    files: list[str],
    packages: pathlib.Path,
    settings: dict[str, str],
    ranks: int = 1,
) -> dict:
    """Return the report of `script --run NAME REPORT CHECKOUT FILES`, run in one or more processes.

    packages: comes first on the path. `import torch` registers the adapters unless they are
    disabled.
    ranks: number of processes at once, as torchrun starts them; a test must pass in each.
    """
    path = os.pathsep.join([str(packages), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = settings | {"PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
    with tempfile.TemporaryDirectory() as folder:
        outputs = [pathlib.Path(folder) / f"report{rank}.json" for rank in range(ranks)]
        logs = [output.with_suffix(".log") for output in outputs]
        started = [
            subprocess.Popen(
                [sys.executable, script, "--run", name, str(output), str(checkout), *files],
                cwd=folder,
                env=os.environ | settings | as_rank(rank, ranks),
                stdout=logs[rank].open("w"),
                stderr=subprocess.STDOUT,
            )
            for rank, output in enumerate(outputs)
        ]
        ends = [process.wait() for process in started]
        for output, log, end in zip(outputs, logs, ends, strict=True):
            if not output.exists():
                sys.exit(f"{log.read_text()[-5000:]}\n{name}: the process ended with {end}")
        return together([json.loads(output.read_text()) for output in outputs])


def on_emulated_npu() -> None:
    """Restart this script on the emulated NPU, unless it already runs there."""
    if os.environ.get("NPU_OPS_EMULATOR") != "1":
        command = [sys.executable, "-m", "npu_ops_emulator", "--", sys.executable, *sys.argv]
        sys.exit(subprocess.run(command, check=False).returncode)


def as_rank(rank: int, ranks: int) -> dict[str, str]:
    if ranks == 1:
        return {}
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}


def together(reports: list[dict]) -> dict:
    """Combine the ranks' reports: a test's outcome is that of the first rank where
    it did not pass."""
    first, *others = reports
    for test, (outcome, _) in list(first["tests"].items()):
        ends = [report["tests"].get(test, ("not run", "")) for report in others]
        if outcome == "passed":
            first["tests"][test] = next((e for e in ends if e[0] != "passed"), ("passed", ""))
    return first


def reason(report) -> str:
    """Return one line on why a test did not pass; tests with the same reason have the same line."""
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    if hasattr(report.longrepr, "errorstring"):  # a missing fixture
        return report.longrepr.errorstring.strip().partition("\n")[0]
    if crash is None:  # a file that cannot be collected
        return report.longreprtext.strip().splitlines()[-1].removeprefix("E").strip()
    first = crash.message.partition("\n")[0]
    bare = first == "AssertionError"
    return f"{pathlib.Path(crash.path).name}:{crash.lineno}: {first}" if bare else first


def compare(reports: dict[str, dict], files: list[str]) -> int:
    """Print the results of the runs, `without` first; each is a Record's report.

    Returns:
        1 if a test passes only without npu-ops, or if no call reached npu-ops.
    """
    tests = dict.fromkeys(test for report in reports.values() for test in report["tests"])
    ends = {
        test: [tuple(report["tests"].get(test, ("not run", ""))) for report in reports.values()]
        for test in tests
    }
    show_counts(reports, files)
    show_reasons(ends)
    show_differences(ends, list(reports))
    lost = any(is_lost(*(outcome for outcome, _ in runs)) for runs in ends.values())
    if not reports["with"]["calls"]:
        print("\nNo call reached npu-ops, so this says nothing about it.")
    return int(lost or not reports["with"]["calls"])


def show(record: Record, meanings) -> int:
    """Print the outcomes of a single run.

    meanings: `meanings(test, why)` explains why a test did not pass; unexplained tests are lost.

    Returns:
        1 if a test is lost, or if no call reached npu-ops.
    """
    print("\npassed / failed / skipped, calls to npu-ops")
    for file in sorted({test.partition("::")[0] for test in record.tests}):
        print(f"{file:50}{counts(record.report(), file)}")
    print()
    lost, reasons = 0, collections.Counter()
    for test, (outcome, why) in record.tests.items():
        if outcome != "passed":
            found = meanings(test, why)
            lost += not found
            reasons[f"{outcome}: {found[-1] if found else f'{test}: {why}'}"] += 1
    for sentence, number in reasons.most_common():
        print(f"{number} {sentence}")
    return int(lost > 0 or not record.calls)


def show_counts(reports: dict[str, dict], files: list[str]) -> None:
    title = "passed / failed / skipped, calls to npu-ops"
    print(f"{title:50}" + "".join(f"{name:19}" for name in reports))
    for file in files:
        cells = (f"{counts(report, file):19}" for report in reports.values())
        print(f"{file:50}{''.join(cells)}".rstrip())


def counts(report: dict, file: str) -> str:
    ends = [end for test, (end, _) in report["tests"].items() if test.partition("::")[0] == file]
    if not ends:
        return "not there"
    numbers = " / ".join(str(ends.count(outcome)) for outcome in OUTCOMES)
    return f"{numbers}, {report['calls'].get(file, 'none')}"


def show_reasons(ends: dict[str, list]) -> None:
    print("\nThe same in every run:")
    same = (runs[0] for runs in ends.values() if runs.count(runs[0]) == len(runs))
    for (outcome, why), number in collections.Counter(same).most_common():
        print(f"{number:5} {outcome}{': ' if why else ''}{why}")


def show_differences(ends: dict[str, list], names: list[str]) -> None:
    print("\nNot the same:")
    for test, runs in ends.items():
        if runs.count(runs[0]) < len(runs):
            print(f"  {test}")
            for name, (outcome, why) in zip(names, runs, strict=True):
                print(f"    {name:9} {outcome} {why}".rstrip())


def is_lost(without: str, *ours: str) -> bool:
    return without == "passed" and any(outcome != "passed" for outcome in ours)
