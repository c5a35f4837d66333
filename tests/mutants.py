"""Mutation testing of an op's Python code: each mutant must make a test of that op fail.

    python tests/mutants.py l2norm                    # all mutants, all tests of the op
    python tests/mutants.py rope --sample 60          # some mutants, the same ones each time
    python tests/mutants.py rope --contract-only      # only the tests that all ops share
    python tests/mutants.py rope --functions          # a second each: not code that runs at import
    python tests/mutants.py l2norm --csv tests/mutants.csv

A mutant (python_mutations.py) changes one place in `npu_ops/ops/OP`. For example, it ignores an
option, leaves out a check, moves a bound by one, does not pass a dtype on, or assumes a stride.
Tests are collected once. Each mutant runs in a forked process, in which the functions get the
changed code. Tests that reach the changed line run first, then those that come close; the quickest
go first, until one fails. A mutant of code that runs at import is put in place before npu_ops is
imported.
Triton kernels have no mutants here, as they run on a device. For AscendC kernels see
tests/emulator/mutants.py.
"""

from __future__ import annotations

import argparse
import collections
import csv
import importlib.util
import inspect
import json
import os
import pathlib
import random
import resource
import signal
import sys
import time
import types

TESTS = pathlib.Path(__file__).parent
sys.path[:0] = [str(TESTS)]
import python_mutations  # noqa: E402
from mutant_scores import CAUGHT, summary  # noqa: E402
from python_mutations import ROOT, Mutant  # noqa: E402

CONTRACT = (
    "test_contract", "test_declined_calls", "test_every_function", "test_index_values",
    "test_wrong_calls",
)  # fmt: skip
# Test files for all ops that are not part of the contract tests.
SHARED = ("test_defaults", "test_lengths")
# Op -> additional test files, which are not named after the op.
MORE = {
    "causal_conv1d": ("test_context_parallel", "test_fla_npu", "test_wide_filters"),
    "causal_conv1d_update": ("test_wide_filters",),
    "chunk_gated_delta_rule": (
        "test_context_parallel",
        "test_delta_rules",
        "test_fla_npu",
        "test_invariance",
    ),
    "fused_recurrent_gated_delta_rule": (
        "test_context_parallel",
        "test_delta_rules",
        "chunk_gated_delta_rule/test_unfinished",
    ),
    "gated_delta_rule_update": ("test_fla_npu", "test_invariance"),
    "gdn_gate": ("test_softplus",),
    "qk_norm_rope": ("test_consistent_rope",),
}
# Words in the names of tests that take seconds. They do not run, so the score may be too low, but
# never too high.
LONG = {"compile", "compiled", "compilation", "opcheck", "threads", "checkpointing"}
# CPU seconds for the tests of one mutant, and the limit after which it counts as an endless loop
# (twice as long if its code runs at import).
BUDGET, LIMIT = 30, 60


# ---- tests ----


def test_files(op: str, contract_only: bool) -> list[str]:
    folder = TESTS / "ops"
    files = [folder / f"{name}.py" for name in CONTRACT]
    if not contract_only:
        files += [folder / f"{name}.py" for name in (*SHARED, *MORE.get(op, ()))]
        files += sorted([*folder.glob(f"test_{op}*.py"), *(folder / op).glob("test_*.py")])
    return list(map(str, dict.fromkeys(files)))


def is_of(item, op: str, calls: set[str]) -> bool:
    """Return whether this item of a test for all ops is about `op`."""
    given = getattr(item, "callspec", None)
    if given is None:
        return False
    values = given.params.values()
    named = {str(getattr(value, "call", value)).partition("-")[0] for value in values}
    named |= {getattr(value, name, "") for value in values for name in ("__name__", "op")}
    return bool({op, *calls} & named)


def words_of(item) -> set[str]:
    return set(item.originalname.split("_"))


class Session:
    """A pytest plugin that keeps the tests of one op and passes them to `loop`, which runs them."""

    def __init__(self, op: str, loop):
        self.op, self.loop = op, loop
        self.failed = False

    def pytest_collection_modifyitems(self, config, items):
        from npu_ops.core import cases

        calls = {str(call) for call in cases.of(self.op).CALLS}
        shared = {*CONTRACT, *SHARED}
        kept = [i for i in items if i.path.stem not in shared or is_of(i, self.op, calls)]
        items[:] = [i for i in kept if not (i.get_closest_marker("slow") or LONG & words_of(i))]

    def pytest_runtest_logreport(self, report):
        self.failed |= report.failed

    def pytest_runtestloop(self, session):
        self.loop(self, session.items)
        return True

    def passes(self, item) -> bool:
        self.failed = False
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        return not self.failed


def run_session(op: str, files: list[str], loop) -> None:
    import hypothesis
    import pytest

    hypothesis.settings.register_profile("mutants", database=None, derandomize=True)
    hypothesis.settings.load_profile("mutants")
    os.chdir(ROOT)
    pytest.main(["-q", "-p", "no:cacheprovider", *files], plugins=[Session(op, loop)])


# ---- processes ----


def in_a_fork(function, seconds: float = 0) -> object:
    """Return what `function` returns, called in a child process that may change, crash or hang."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        if seconds:
            used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
            resource.setrlimit(resource.RLIMIT_CPU, (int(used + seconds) + 1,) * 2)
        with os.fdopen(write, "w") as pipe:
            json.dump(function(), pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return "no end" if os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL) else "crash"
    return json.loads(said) if said else "crash"


def traced(passes, names: set[str]) -> tuple[bool, float, list]:
    """Run one test; return whether it passes, its CPU seconds, and the lines it runs.

    names: the files whose lines are traced.
    """
    lines = set()

    def trace(frame, event, _):
        if frame.f_code.co_filename not in names:
            return None
        lines.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    begin = time.process_time()
    sys.settrace(trace)
    try:
        passed = passes()
    finally:
        sys.settrace(None)
    return passed, time.process_time() - begin, sorted(lines)


# ---- mutants ----


def codes(code: types.CodeType) -> list[types.CodeType]:
    """Return a code object and all code objects nested in it, always in the same order."""
    within = [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return [code, *(each for one in within for each in codes(one))]


def changed_codes(mutant: Mutant) -> dict[tuple, types.CodeType] | None:
    """Return the new code of each changed function, by (file, name, position).

    None if the mutant changes code that runs at import: the body of the module or of a class.
    """
    name = str(mutant.path)
    old = codes(compile(mutant.path.read_text(), name, "exec", dont_inherit=True))
    new = codes(mutant.code())
    if len(old) != len(new):
        return None
    pairs = list(zip(old, new, strict=True))
    if any(own(one) != own(other) for one, other in pairs if not is_function(one)):
        return None
    return {identity(one): other for one, other in pairs if is_function(one) and one != other}


def is_function(code: types.CodeType) -> bool:
    return bool(code.co_flags & inspect.CO_OPTIMIZED)


def own(code: types.CodeType) -> tuple:
    """Return a code object's own content, without the functions and classes nested in it."""
    values = [
        (type(value), value) for value in code.co_consts if not isinstance(value, types.CodeType)
    ]
    return code.co_code, values, code.co_names, code.co_varnames


def identity(code: types.CodeType) -> tuple:
    return code.co_filename, code.co_qualname, *next(iter(code.co_positions()))


def put_in_place(changed: dict[tuple, types.CodeType]) -> None:
    import gc

    for one in gc.get_objects():
        if isinstance(one, types.FunctionType) and identity(one.__code__) in changed:
            one.__code__ = changed[identity(one.__code__)]


def module_name(path: str | pathlib.Path) -> str:
    parts = pathlib.Path(path).relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


class Finder:
    """An import finder that loads the mutant in place of its module."""

    def __init__(self, mutant: Mutant):
        self.mutant = mutant
        self.name = module_name(mutant.path)

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        file = str(self.mutant.path)
        spec = importlib.util.spec_from_file_location(name, file)
        spec.loader.exec_module = lambda module: exec(self.mutant.code(), module.__dict__)
        return spec


class Verdicts:
    """Runs the mutants of one op. found: mutant -> its verdict, e.g. "result" or "survives"."""

    def __init__(self, op: str, mutants: list[Mutant], contract_only: bool, functions: bool):
        self.op, self.mutants, self.functions = op, mutants, functions
        self.files = test_files(op, contract_only)
        self.found: dict[Mutant, str] = {}

    def collect(self) -> dict[Mutant, str]:
        """Run mutants of functions in forks of one pytest session.

        A mutant of code that runs at import has a session of its own, in a fork of this process.
        """
        of_modules = [mutant for mutant in self.mutants if changed_codes(mutant) is None]
        self.mutants = [m for m in self.mutants if m not in of_modules or not self.functions]
        for mutant in of_modules * (not self.functions):
            verdict = in_a_fork(lambda mutant=mutant: self._of_module(mutant), 2 * LIMIT)
            self._note(mutant, verdict)
        of_functions = [mutant for mutant in self.mutants if mutant not in of_modules]
        run_session(
            self.op, self.files, lambda s, items: self._of_functions(s, items, of_functions)
        )
        return self.found

    def _of_module(self, mutant: Mutant) -> str:
        verdicts = ["result"]  # if pytest cannot even collect

        def loop(session, items):
            quickest = sorted(items, key=lambda item: item.path.stem not in CONTRACT)
            verdicts[:] = [self._verdict(session, quickest)]

        sys.meta_path.insert(0, Finder(mutant))
        run_session(self.op, self.files, loop)
        return verdicts[0]

    def _of_functions(self, session, items, mutants) -> None:
        names = {str(path) for path in python_mutations.files(self.op)}
        for path in names:  # their functions can be changed only once they are imported
            importlib.import_module(module_name(path))
        known = in_a_fork(lambda: [traced(lambda i=i: session.passes(i), names) for i in items])
        right = [
            (seconds, {tuple(line) for line in lines}, item)
            for (passed, seconds, lines), item in zip(known, items, strict=True)
            if passed
        ]
        print(f"{self.op}: {len(right)} of {len(items)} tests pass", file=sys.stderr, flush=True)
        right.sort(key=lambda one: one[0])
        for mutant in mutants:
            place = str(mutant.path), mutant.line
            there = [(place not in lines, item) for _, lines, item in right
                     if self._reaches(lines, mutant, place)]  # fmt: skip
            reached = [item for _, item in sorted(there, key=lambda one: one[0])]
            changed = changed_codes(mutant)

            def run(changed=changed, reached=reached):
                put_in_place(changed)
                return self._verdict(session, reached)

            self._note(mutant, in_a_fork(run, LIMIT) if reached else "unreached")

    @staticmethod
    def _reaches(lines, mutant, place) -> bool:
        if not mutant.rule.startswith("the option"):
            return any(file == place[0] and abs(line - place[1]) <= 3 for file, line in lines)
        return any(file == place[0] and line > place[1] for file, line in lines)

    @staticmethod
    def _verdict(session, items) -> str:
        end = time.process_time() + BUDGET
        for item in items:
            if time.process_time() > end:
                break
            if not session.passes(item):
                return "result"
        return "survives"

    def _note(self, mutant, verdict) -> None:
        self.found[mutant] = verdict
        if verdict not in CAUGHT:
            print(f"{verdict}: {mutant}", file=sys.stderr, flush=True)


def chosen(op: str, sample: int | None, only: str) -> list[Mutant]:
    found = [m for path in python_mutations.files(op) for m in python_mutations.mutants_of(path)]
    found = [mutant for mutant in found if only in f"{mutant.rule} {mutant.file}:{mutant.line}"]
    if sample and sample < len(found):
        found = sorted(random.Random(op).sample(found, sample), key=lambda m: (m.file, m.place))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("op")
    parser.add_argument(
        "--contract-only", action="store_true", help="by the tests of all ops alone"
    )
    parser.add_argument("--sample", type=int, help="so many mutants, the same ones each time")
    parser.add_argument("--functions", action="store_true", help="none of what imports run")
    parser.add_argument("--only", default="", help="those with this in rule, file and line")
    parser.add_argument("--csv", type=pathlib.Path, help="a table to put the score in")
    options = parser.parse_args()
    import torch  # noqa: F401
    import transformers  # noqa: F401  # import both before the forks, which share them

    mutants = chosen(options.op, options.sample, options.only)
    found = Verdicts(options.op, mutants, options.contract_only, options.functions).collect()
    count = collections.Counter(found.values())
    print(f"{options.op}: {summary(count)}")
    if options.csv:
        write(options, count)
    return 0


FIELDS = ("op", "tests", "mutants", "caught", "percent", "command")


def write(options, count: collections.Counter) -> None:
    """Put a row in the table, replacing the row for the same op and tests."""
    tests = "contract" if options.contract_only else "all"
    caught, tried = sum(count[verdict] for verdict in CAUGHT), sum(count.values())
    more = " --contract-only" * options.contract_only
    more += " --functions" * options.functions
    more += f" --sample {options.sample}" if options.sample else ""
    command = f"python tests/mutants.py {options.op}{more}"
    row = (options.op, tests, tried, caught, f"{100 * caught / tried:.1f}", command)
    rows = []
    if options.csv.exists():
        with options.csv.open(newline="") as file:
            rows = list(csv.reader(file))[1:]
    rows = sorted([r for r in rows if (r[0], r[1]) != row[:2]] + [list(map(str, row))])
    with options.csv.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([FIELDS, *rows])


if __name__ == "__main__":
    sys.exit(main())
