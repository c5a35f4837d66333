"""Mutation testing of our AscendC kernels: a check of the twin or a wrong result must catch each.

    npu-ops emulate -- python tests/emulator/mutants.py                        # all of them
    npu-ops emulate -- python tests/emulator/mutants.py --op rope --sample 40  # some, by --seed

A mutant is an AscendC kernel with one place changed by a rule of mutations.py. For example, a wait,
free, event or instruction is left out, a buffer halved, an edge moved, another queue used, or cores
do the same work. The mutant runs the cases of its op that reach that place, the quickest first,
until one catches it: on all cores, and on two with less memory, where a core has many tiles. Prints
the score of each file and the survivors. The exit status is 1 if equivalent_mutants.py does not
explain a survivor.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import ctypes
import dataclasses
import json
import os
import pathlib
import random
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator

import torch_npu  # noqa: F401
from npu_ops_emulator import twins

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import mutations
from equivalent_mutants import EQUIVALENT
from mutant_examples import Example, examples
from mutant_scores import CAUGHT, summary
from mutations import Build, Mutant

from npu_ops.core import ascendc, library

# Limit of a mutant in CPU seconds, which ends endless loops, and in seconds of waiting.
LIMIT, PATIENCE = 15, 1200


# ---- the process that runs them ----


class Library:
    """A loaded build: switches mutants on, reads which were reached and the twin's warnings."""

    def __init__(self, build: Build):
        self.path = build.path
        loaded = ctypes.CDLL(str(build.path))
        self._on = ctypes.c_int.in_dll(loaded, "npu_ops_mutant")
        self._reached = (ctypes.c_ubyte * len(build.mutants)).in_dll(loaded, "npu_ops_reached")
        self._findings = twins._loaded_library().npu_ops_twin_findings
        self._target = ascendc.target
        self.example: Example
        self.warnings: set[str] = set()

    def install(self) -> None:
        """Make npu_ops launch this build.

        npu_ops asks for a target before each launch; then the warnings of the last launch are still
        there.
        """

        def target(op, device):
            self._collect()
            _, cores, memory = self._target(op, device)
            return str(self.path), self.example.cores or cores, self.example.memory or memory

        ascendc.target = target

    def run(self, example: Example, mutant: int = -1) -> str | None:
        """Run an example; return what caught the mutant, None if nothing did."""
        self._on.value = mutant
        self.example, self.warnings = example, set()
        try:
            right = example.run()
        except RuntimeError as error:
            if "the AscendC kernel is wrong" not in str(error):
                raise
            return "check"
        self._collect()
        return None if right else "result"

    def reached(self) -> list[int]:
        """Return the mutants that were reached since the last call."""
        numbers = [number for number, reached in enumerate(self._reached) if reached]
        ctypes.memset(self._reached, 0, len(self._reached))
        return numbers

    def _collect(self) -> None:
        for finding in twins.parse(self._findings().decode()):
            if finding.severity == "warning":
                self.warnings.add(f"{finding.check} {finding.access} {finding.other}")


@dataclasses.dataclass
class Known:
    """Facts about an example: its seconds, the mutants it reaches, and warnings
    without a mutant."""

    seconds: float
    reached: set[int]
    warnings: set[str]


def work(op: str) -> None:
    """Run the mutants whose numbers come on stdin, one per line; print a verdict for each."""
    build = mutations.build(op)
    library.poison_outputs = True
    running = Library(build)
    running.install()
    made = examples(op)
    known = [learn(running, example) for example in made]
    order = sorted(range(len(made)), key=lambda i: known[i].seconds)
    passed = {number for of_one in known for number in of_one.reached}
    print(json.dumps({"reached": sorted(passed)}), flush=True)
    for line in sys.stdin:
        number = int(line)
        verdict = None
        for i in order:
            if number in known[i].reached:
                verdict = running.run(made[i], number)
                if verdict is None and running.warnings - known[i].warnings:
                    verdict = "warning"
                if verdict:
                    break
        print(json.dumps({"verdict": verdict, "by": made[i].name if verdict else None}), flush=True)


def learn(running: Library, example: Example) -> Known:
    running.reached()
    begin = time.perf_counter()
    verdict = running.run(example)
    seconds = time.perf_counter() - begin
    if verdict:
        raise AssertionError(f"{example.op}, {example.name}: the kernel itself is wrong: {verdict}")
    return Known(seconds, set(running.reached()), running.warnings)


class Worker:
    """A child process in which mutants may crash or hang."""

    def __init__(self, op: str):
        command = [sys.executable, __file__, "--work", op]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        answer = self._answer(PATIENCE)
        if "reached" not in answer:
            raise RuntimeError(f"{op}: its kernels do not run: {answer}")
        self.reached = set(answer["reached"])

    def verdict(self, number: int) -> str | None:
        print(number, file=self._process.stdin, flush=True)
        return self._answer(LIMIT)["verdict"]

    def _answer(self, seconds: float) -> dict:
        """Return the child's next line. The limit is in the child's CPU seconds, not in time."""
        patience, used = time.monotonic() + PATIENCE, self._processor_time()
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._process.stdout, selectors.EVENT_READ)
            while not waiting.select(1):
                if self._processor_time() > used + seconds or time.monotonic() > patience:
                    return {"verdict": "no end"}
        line = self._process.stdout.readline()
        return json.loads(line) if line.startswith("{") else {"verdict": "crash"}

    def _processor_time(self) -> float:
        """Return the CPU seconds that the process has used (proc(5), stat)."""
        stat = pathlib.Path(f"/proc/{self._process.pid}/stat").read_text()
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def verdicts(op: str, chosen: list[Mutant], build: Build) -> Iterator[tuple[Mutant, str | None]]:
    """Yield each mutant with what caught it; "unreached" if no case reaches it."""
    worker = Worker(op)
    for mutant in chosen:
        number = build.mutants.index(mutant)
        verdict = worker.verdict(number) if number in worker.reached else "unreached"
        if verdict in ("crash", "no end"):
            worker.end()
            worker = Worker(op)
        yield mutant, verdict
    worker.end()


# ---- the score ----


def why_equivalent(mutant: Mutant) -> str | None:
    """Return why a mutant behaves like the kernel, None if no reason is listed."""
    for (file, rule, old), why in EQUIVALENT.items():
        if (file, rule) == (mutant.file, mutant.rule) and old in " ".join(mutant.old.split()):
            return why
    return None


def chosen_mutants(options) -> dict[str, list[Mutant]]:
    """Return the mutants by op, or a sample of them."""
    chosen = {}
    for op in [options.op] if options.op else mutations.ops():
        found = [m for file in mutations.device_files(op) for m in mutations.mutants_of(file)]
        found = [mutant for mutant in found if (options.only or "") in str(mutant)]
        if options.sample:
            found = random.Random(options.seed).sample(found, min(options.sample, len(found)))
        chosen[op] = found
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--op", help="of one op alone")
    parser.add_argument("--only", help="those that have this in their line, a file or a rule")
    parser.add_argument("--sample", type=int, help="so many of each op")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work)
        return 0
    results: dict[Mutant, str | None] = {}
    chosen = chosen_mutants(options)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        builds = {op: pool.submit(mutations.build, op) for op in chosen}
        for op, mutants in chosen.items():
            build = builds[op].result()
            results |= dict.fromkeys(set(mutants) & set(build.refused), "does not compile")
            # A mutant of a shared header is caught if one op's cases catch it.
            left = [m for m in mutants if m in build.mutants and results.get(m) not in CAUGHT]
            for mutant, verdict in verdicts(op, left, build):
                if mutant not in results or verdict != "unreached":
                    results[mutant] = verdict
                if verdict not in CAUGHT:
                    print(f"{op}: {verdict or 'survives'}: {mutant}", file=sys.stderr, flush=True)
            print(f"{op}: {len(left)} tried", file=sys.stderr, flush=True)
    return report(results)


def report(results: dict[Mutant, str | None]) -> int:
    """Print the score; return 1 if a survivor has no explanation."""
    by_file: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    unexplained = []
    for mutant, verdict in sorted(results.items(), key=lambda item: (item[0].file, item[0].line)):
        if verdict not in CAUGHT and verdict != "does not compile":
            why = why_equivalent(mutant)
            verdict = "equivalent" if why else verdict or "survives"
            print(f"{verdict}: {mutant}{f': {why}' if why else ''}")
            unexplained += [] if why else [mutant]
        by_file[mutant.file][verdict] += 1
    for file, count in by_file.items():
        print(f"{file}: {summary(count)}")
    total = sum(by_file.values(), collections.Counter())
    print(f"all: {summary(total)}; {total['equivalent']} explained, {len(unexplained)} not")
    return bool(unexplained)


if __name__ == "__main__":
    sys.exit(main())
