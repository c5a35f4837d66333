"""Search for failing cases: hypothesis draws them and shrinks what it finds."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shlex
import time
from collections.abc import Callable

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st

from fuzz.child import Child
from fuzz.judge import MALFORMED
from fuzz.memory import FORMS, ROUTES
from fuzz.targets import TARGETS
from fuzz.ways import TRANSFORMS

SIMPLEST = {
    "settings": {}, "seed": 0, "forms": [], "way": "eager", "grad": False,
    "defaults": ["float32", None, "set"], "rewrite": None, "malformed": None,
}  # fmt: skip
# How often each way to call is drawn. Compiling takes a second, the others milliseconds.
WAYS = (
    *["eager"] * 14, *["watched"] * 3, "inference", "checkpoint", "explained", "preferred",
    *["alone"] * 3, *TRANSFORMS, *["compiled"] * 2,
)  # fmt: skip


@dataclasses.dataclass
class Finding:
    """A failing case, shrunk, and what is wrong with it."""

    case: dict
    verdict: str
    alone: bool  # whether it also fails alone in a new process

    def __str__(self) -> str:
        after = "" if self.alone else " (not alone: only after the cases before it)"
        return f"{self.case['function']}: {self.verdict}{after}\n  {repeating(self.case)}"


def short(case: dict) -> dict:
    """Return a case without the values that are the simplest."""
    simplest = TARGETS[case["function"]].simplest
    chosen = {n: x for n, x in case["settings"].items() if n not in simplest or x != simplest[n]}
    case = case | {"settings": chosen}
    return {"function": case["function"]} | {n: case[n] for n in SIMPLEST if case[n] != SIMPLEST[n]}


def complete(case: dict) -> dict:
    """Undo `short`."""
    simplest = TARGETS[case["function"]].simplest
    case = SIMPLEST | case
    return case | {"settings": simplest | case["settings"]}


def repeating(case: dict) -> str:
    """Return the command that repeats a case."""
    return f"npu-ops fuzz --repeat {shlex.quote(json.dumps(short(case), separators=(',', ':')))}"


def cases(function: str, drawn: tuple[str, ...] = WAYS) -> st.SearchStrategy:
    """Return hypothesis's strategy for the cases of a function."""
    target = TARGETS[function]
    wrong = st.tuples(
        st.integers(0, 3), st.lists(st.sampled_from(MALFORMED), min_size=1, max_size=3)
    )
    return st.fixed_dictionaries({
        "function": st.just(function), "settings": target.settings, "seed": st.integers(0, 99),
        "forms": st.lists(st.sampled_from(FORMS), max_size=3), "way": st.sampled_from(drawn),
        "grad": st.booleans() if target.wrt else st.just(False),
        "defaults": st.tuples(
            st.sampled_from(["float32"] * 4 + ["float64", "bfloat16", "float16"]),
            st.sampled_from([None] * 4 + ["meta"]), st.sampled_from(["set", "context"]),
        ),
        "rewrite": st.sampled_from([None] * 5 + list(ROUTES)),
        "malformed": st.none() | st.none() | wrong if target.indices else st.none(),
    }).map(lambda case: json.loads(json.dumps(case)))  # fmt: skip


class Search:
    """Searches for failing cases and reports each kind once.

    drawn: ways to call; one that is listed twice is drawn twice as often.
    until: when to stop, in time.monotonic's seconds.
    shrinking: seconds for shrinking one case.
    """

    def __init__(
        self, child: Child, *, drawn: tuple[str, ...] = WAYS, until: float = float("inf"),
        shrinking: float = 25.0,
    ):  # fmt: skip
        self.child, self.drawn, self.until, self.shrinking = child, drawn, until, shrinking
        self.tried, self.known, self.findings = 0, [], []

    def of(self, function: str, examples: int, start: int | None) -> list[Finding]:
        """Return the new findings of one function, from `examples` drawn cases at a time.

        start: seed of the random numbers; None: always the same ones.
        """
        found, verdicts = [], {}
        while time.monotonic() < self.until:
            finding = self._next(function, examples, start, verdicts)
            if finding is None:
                break
            found.append(finding)
        return found

    def _next(
        self, function: str, examples: int, start: int | None, verdicts: dict
    ) -> Finding | None:
        """Return the next finding, or None. verdicts: by case, of the cases judged before."""
        failed, first = [], []

        @settings(
            max_examples=examples, database=None, deadline=None, derandomize=start is None,
            phases=(Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck),
            verbosity=Verbosity.quiet, report_multiple_bugs=False,
        )  # fmt: skip
        @given(cases(function, self.drawn))
        def search(case):
            line = json.dumps(case)
            if line not in verdicts:
                now = time.monotonic()
                if now > self.until or (first and now > first[0] + self.shrinking):
                    return
                verdicts[line] = self.child.judge(case)
                self.tried += 1
            verdict = verdicts[line]
            if verdict is None or self._is_known(case, verdict):
                return
            first.append(time.monotonic())
            failed.append((case, verdict))
            raise AssertionError(verdict)

        if start is not None:
            search = seed(start)(search)
        with contextlib.suppress(AssertionError):  # `failed` has the case
            search()
        if not failed:
            return None
        case, verdict = failed[-1]
        self.known += [(kind(c, v), chosen(c)) for c, v in (failed[0], failed[-1])]
        other = Child()
        try:
            alone = other.judge(case)
        finally:
            other.stop()
        finding = Finding(case, alone or verdict, alone is not None)
        self.findings.append(finding)
        return finding

    def _is_known(self, case: dict, verdict: str) -> bool:
        """Return whether a known finding has the same kind, and only settings that this case has.

        Only settings count that differ from their simplest value.
        """
        return any(kind(case, verdict) == k and of <= chosen(case) for k, of in self.known)


def chosen(case: dict) -> set[str]:
    """Return the names of the settings that do not have their simplest value."""
    return set(short(case).get("settings", ()))


def kind(case: dict, verdict: str) -> tuple:
    """Return a key: findings with equal keys count as the same.

    If a transform is unsupported, it is so for all functions. So keys of transforms do not contain
    the function.
    """
    words = re.sub(r"[-+]?\d[\d.e+-]*|0x\w+|\[.*?\]", "#", verdict)
    special = [n for n in ("rewrite", "malformed") if case[n]]
    usual = case["defaults"][:2] == SIMPLEST["defaults"][:2]
    function = "" if case["way"] in TRANSFORMS else case["function"]
    return function, case["way"], words, tuple(special), usual


def fuzz(
    seconds: float, start: int, functions: list[str] | None, drawn: list[str] | None,
    say: Callable[[str], None], examples: int = 60,
) -> list[Finding]:  # fmt: skip
    """Search for this many seconds, all functions in turn; print and return the findings."""
    functions = functions or list(TARGETS)
    if unknown := set(functions) - TARGETS.keys():
        raise ValueError(f"functions: got {sorted(unknown)}, needs some of {list(TARGETS)}")
    if unknown := set(drawn or ()) - set(WAYS):
        raise ValueError(f"way: got {sorted(unknown)}, needs some of {sorted(set(WAYS))}")
    begin = time.monotonic()
    search = Search(Child(), drawn=tuple(drawn or WAYS), until=begin + seconds)
    turn = 0
    try:
        while time.monotonic() < search.until:
            for n, function in enumerate(functions):
                number = (start * 1_000_003 + turn) * len(TARGETS) + n
                for finding in search.of(function, examples, number):
                    say(f"{time.monotonic() - begin:.0f} s: {finding}")
            turn += 1
            say(
                f"{time.monotonic() - begin:.0f} s: {search.tried} cases, "
                f"{len(search.findings)} findings"
            )
    finally:
        search.child.stop()
    return search.findings


def repeat(line: str) -> list[Finding]:
    """Judge one case, given as JSON, in a child process; return the finding, if it is one."""
    try:
        case = complete(json.loads(line))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"repeat: got {line!r}, needs a case as a finding prints it") from error
    child = Child()
    try:
        verdict = child.judge(case)
    finally:
        child.stop()
    return [Finding(case, verdict, True)] if verdict else []
