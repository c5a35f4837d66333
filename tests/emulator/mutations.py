"""Makes mutations of npu-ops' AscendC kernels, and sources that contain all of them.

One build of an op contains every mutation behind `npu_ops_mutated(number)`, and a variable of the
library selects one. So a mutant needs no compilation, and the library records which mutants a call
reaches.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
import hashlib
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator

from npu_ops_emulator import EmulatorError, headers, twins


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A mutation: `text` replaces [start, end) of `file`; `line` counts from 1."""

    rule: str
    file: str
    start: int
    end: int
    line: int
    old: str
    text: str
    is_statement: bool

    def __str__(self):
        old, new = (" ".join(text.split()) for text in (self.old, self.text))
        return f"{self.rule}: {self.file}:{self.line}: {old} -> {new or '(nothing)'}"


# ---- rules ----

# A place to change, in text without comments: start, end, replacement.
Place = tuple[int, int, str]
Find = Callable[[str], Iterator[Place]]


def closing(text: str, opening: int) -> int:
    """Return the position of the bracket that closes the one at `opening`."""
    depth = 0
    for at in range(opening, len(text)):
        depth += (text[at] in "([{") - (text[at] in ")]}")
        if depth == 0:
            return at
    raise ValueError(f"nothing closes {text[opening : opening + 40]!r}")


def arguments(text: str, opening: int) -> list[tuple[int, int]]:
    """Return (start, end) of each argument of a call whose bracket opens at `opening`."""
    spans, depth, start = [], 0, opening + 1
    for at in range(opening, closing(text, opening) + 1):
        depth += text[at] in "([{"
        if (text[at] == "," and depth == 1) or at == closing(text, opening):
            begin = start + len(text[start:at]) - len(text[start:at].lstrip())
            spans.append((begin, at))
            start = at + 1
        depth -= text[at] in ")]}"
    return spans


def statements(call: str) -> Callable[[str], Iterator[tuple[int, int, int]]]:
    """Return a function that finds statements which only call `call` or assign its result.

    call: a regular expression for the name. The function yields (start, end, position of "(").
    """
    begin = r"^[ \t]*(?:else )?(?:if \([^()]*\) )?"
    called = rf"((?:\w+ = )?[\w.:\[\]]*?(?:template )?\b(?:{call})(?:<[^;()]*>)?)\("
    pattern = re.compile(begin + called, re.M)

    def find(text: str) -> Iterator[tuple[int, int, int]]:
        for match in pattern.finditer(text):
            opening = match.end() - 1
            end = closing(text, opening) + 1
            if text[end : end + 1] == ";":
                yield match.start(1), end + 1, opening

    return find


def dropped(call: str) -> Find:
    """A rule: remove the statement."""

    def find(text: str) -> Iterator[Place]:
        for start, end, _ in statements(call)(text):
            yield start, end, ""

    return find


def argument(call: str, which: int, new: str, unless: str = r"$^") -> Find:
    """A rule: replace an argument of a call; `{}` in `new` stands for the old text."""

    def find(text: str) -> Iterator[Place]:
        for _, _, opening in statements(call)(text):
            spans = arguments(text, opening)
            if -len(spans) <= which < len(spans):
                start, end = spans[which]
                if not re.search(unless, text[start:end]):
                    yield start, end, new.format(text[start:end])

    return find


def halved_buffers(text: str) -> Iterator[Place]:
    for _, _, opening in statements("InitBuffer")(text):
        start, end = arguments(text, opening)[-1]
        yield start, end, f"({text[start:end]}) / 2"
    for match in re.finditer(r"\.floats\(", text):
        start, end = arguments(text, match.end() - 1)[0]
        yield start, end, f"({text[start:end]}) / 2"


def swapped(call: str) -> Find:
    """A rule: swap the second and third argument of a call."""

    def find(text: str) -> Iterator[Place]:
        for start, end, opening in statements(call)(text):
            (_, _), (a, b), (c, d), *_ = arguments(text, opening)
            if text[a:b] != text[c:d]:
                new = text[start:a] + text[c:d] + text[b:c] + text[a:b] + text[d:end]
                yield start, end, new

    return find


def other_queue(text: str) -> Iterator[Place]:
    """Use the next queue of the same direction for a tile, which swaps double buffers."""
    declared = re.findall(r"TQue<.*?> ((?:\w+, )*\w+);", text)
    following = {}
    for names in map(lambda found: found.split(", "), declared):
        following |= dict(zip(names, names[1:] + names[:1], strict=True))
    for start, end, opening in statements("load|take|Load|Take")(text):
        a, b = arguments(text, opening)[0]
        name = text[a:b]
        if following.get(name, name) != name:
            yield start, end, text[start:a] + following[name] + text[b:end]


def forgotten_edges(text: str) -> Iterator[Place]:
    """Replace the bound in `smaller` by a huge number."""
    for match in re.finditer(r"\bsmaller\(", text):
        start, end = arguments(text, match.end() - 1)[-1]
        if text[start:end] != "int64_t b":
            yield start, end, "int64_t{1} << 40"


def expression(pattern: str, new: str) -> Find:
    """A rule: replace group 1 of a pattern; `{}` in `new` stands for the old text."""

    def find(text: str) -> Iterator[Place]:
        for match in re.finditer(pattern, text):
            yield match.start(1), match.end(1), new.format(match[1])

    return find


def other_connectives(text: str) -> Iterator[Place]:
    """In conditions, replace "and" by "or" and the other way round."""
    begin, part = r"(?:\bif \(|\breturn |[^=!<>]= |\bfor \([^;]*; )", r"(?:(?! = )[^;{}])*?"
    whole = rf"{begin}({part}(?:&&|\|\|){part})(?:;|\)\s*(?:{{|\w))"
    for match in re.finditer(whole, text):
        for each in re.finditer(r"&&|\|\|", match[1]):
            other = {"&&": "||", "||": "&&"}[each[0]]
            new = match[1][: each.start()] + other + match[1][each.end() :]
            yield match.start(1), match.end(1), " ".join(new.split())


# Instructions that change values, and the index of their count argument.
_INSTRUCTION = ("Add|Sub|Mul|Div|Max|Min|Adds|Muls|Maxs|Mins|Abs|Exp|Ln|Sqrt|Reciprocal|Cast|Brcb|"
                "Select|CompareScalar|Gather|WholeReduceSum|And|Or|ShiftRight|Axpy|"
                "MulAddDst")  # fmt: skip
_OWN = ("add_products|add_rows|scale_rows|times_row|plus_row|plus|finish_sums|sigmoid|"
        "sigmoid_slope|load|store|take|copy_in|copy_out|widen|narrow|Load|Take|Drop|"
        "Draw")  # fmt: skip
_NUMBER = r"[a-z_][\w.]*(?:\(\w*\))?"

RULES: dict[str, tuple[Find, bool]] = {
    # name: (finds places and replacements, whether whole statements are replaced)
    "no EnQue": (dropped("EnQue"), True),
    "no DeQue": (dropped("DeQue"), True),
    "no FreeTensor": (dropped("FreeTensor"), True),
    "no SetFlag": (dropped("SetFlag"), True),
    "no WaitFlag": (dropped("WaitFlag"), True),
    "no event": (dropped("Wait"), True),
    "no barrier": (dropped("PipeBarrier"), True),
    "half a buffer": (halved_buffers, False),
    "another queue": (other_queue, True),
    "no zeros before": (dropped("Duplicate"), True),
    "an instruction less": (dropped(_INSTRUCTION), True),
    "a step less": (dropped(_OWN), True),
    "no scalar store": (dropped("SetValue"), True),
    "operands swapped": (swapped("Sub|Div"), True),
    "an element less": (
        argument("Add|Sub|Mul|Div|Adds|Muls|Maxs|Abs|Exp|Sqrt|Cast|Select|Gather", -1, "({}) - 1",
                 unless=r"\{"), False),
    "a column more": (expression(r"\b(tile\.columns)\b(?! ==|\s*=)", "({} + 1)"), False),
    "a row more": (expression(r"\b(tile\.rows)\b(?! /|\s*=)", "({} + 1)"), False),
    "a row less": (expression(r"\b(tile\.rows)\b(?! /|\s*=)", "({} - 1)"), False),
    "an edge forgotten": (forgotten_edges, False),
    "the other side of an edge": (
        expression(r"(?<=[ (])([\w.]+(?: [+-] [\w.]+)? [<>] [\w.]+(?: [+-] [\w.]+)?) \?", "!({})"),
        False),
    "a condition forgotten": (expression(r"\bif \(([^(){};]*)\)", "(({}) || true)"), False),
    "a condition never met": (expression(r"\bif \(([^(){};]*)\)", "(({}) && false)"), False),
    "and for or": (other_connectives, False),
    "an offset forgotten": (
        expression(rf"(?<=[\w)\]])\[({_NUMBER}(?: [*+] {_NUMBER})*)\]", "0 * ({})"), False),
    "the first columns again": (expression(r"\+\s+(tile\.column)\b", "0 * {}"), False),
    "cores do the same": (expression(r"\+= ((?:AscendC::)?GetBlockNum\(\))", "1"), False),
    "cores begin alike": (expression(r"= ((?:AscendC::)?GetBlockIdx\(\))", "0"), False),
    "a stride less": (expression(r"\b(apart)\b(?=[,}])", "static_cast<uint8_t>({} - 2)"), False),
    "rounded down": (expression(r"(RoundMode::CAST_RINT)", "RoundMode::CAST_FLOOR"), False),
    "an edge of a comparison": (expression(r"(CMPMODE::GE)", "CMPMODE::GT"), False),
}  # fmt: skip


def _without_comments(text: str) -> str:
    return re.sub(r"//.*", lambda match: " " * len(match[0]), text)


def mutants_of(file: str) -> list[Mutant]:
    """Return the mutants of a file in csrc."""
    text = (headers.kernel_sources() / file).read_text()
    plain = _without_comments(text)
    ends = [match.start() for match in re.finditer("\n", text)]
    found = {}
    for rule, (find, is_statement) in RULES.items():
        for start, end, new in find(plain):
            line = bisect.bisect_left(ends, start) + 1
            mutant = Mutant(rule, file, start, end, line, text[start:end], new, is_statement)
            found.setdefault((start, end, new), mutant)
    return sorted(found.values(), key=lambda m: (m.start, -m.end, m.rule))


def device_files(op: str) -> list[str]:
    """Return the device code of an op's kernels: its source and each included `*ascendc.h`."""
    files = [f"{op}/{op}_ascendc.cpp"]
    for including in files:
        text = (headers.kernel_sources() / including).read_text()
        for name in re.findall(r'^#include "(.*ascendc\.h)"', text, re.M):
            if name not in files:
                files.append(name)
    return files


def ops() -> list[str]:
    """Return the ops with AscendC kernels."""
    return sorted(path.parent.name for path in headers.kernel_sources().glob("*/*_ascendc.cpp"))


# ---- sources with all mutants ----

_SWITCH = """#pragma once
extern "C" {{
__attribute__((visibility("default"))) int npu_ops_mutant = -1;
__attribute__((visibility("default"))) unsigned char npu_ops_reached[{count}];
}}
inline bool npu_ops_mutated(int number) {{
  npu_ops_reached[number] = 1;
  return npu_ops_mutant == number;
}}
"""


@dataclasses.dataclass(frozen=True)
class Build:
    """A library with an op's kernels and all its mutants, which are numbered."""

    op: str
    path: pathlib.Path
    mutants: tuple[Mutant, ...]
    refused: tuple[Mutant, ...]  # they do not compile


def build(op: str) -> Build:
    """Compile an op's kernels with all mutants, leaving out those that do not compile."""
    chosen = [mutant for file in device_files(op) for mutant in mutants_of(file)]
    refused: list[Mutant] = []
    for _ in range(8):
        folder = _written(op, chosen)
        source = folder / op / f"{op}_ascendc.cpp"
        try:
            path = twins.compile(source, [folder, headers.kernel_sources()]).path
            return Build(op, path, tuple(chosen), tuple(refused))
        except EmulatorError as error:
            wrong = _blamed(str(error), folder, chosen)
            if not wrong:
                raise
            refused += wrong
            chosen = [mutant for mutant in chosen if mutant not in wrong]
    raise EmulatorError(f"{op}: its mutants do not compile, whatever is left out")


def _blamed(errors: str, folder: pathlib.Path, chosen: list[Mutant]) -> list[Mutant]:
    """Return the mutants on lines with compile errors, statement mutants only if there are any."""
    lines = {(file, int(line)) for file, line in re.findall(rf"{folder}/(\S+?):(\d+):", errors)}
    there = [mutant for mutant in chosen if (mutant.file, mutant.line) in lines]
    return [mutant for mutant in there if mutant.is_statement and mutant.text] or there


def _written(op: str, mutants: list[Mutant]) -> pathlib.Path:
    """Write the sources with these mutants to a folder named by their hash; return the folder."""
    numbers = {mutant: number for number, mutant in enumerate(mutants)}
    texts = {"mutant.h": _SWITCH.format(count=max(1, len(mutants)))}
    for file in device_files(op):
        text = (headers.kernel_sources() / file).read_text()
        texts[file] = rendered(text, {m: n for m, n in numbers.items() if m.file == file})
    main = f"{op}/{op}_ascendc.cpp"
    comment, rest = texts[main].split("\n", 1)
    if not comment.startswith("//"):
        raise ValueError(f"{main} does not begin with a comment, whose line is wanted")
    texts[main] = f'#include "mutant.h"\n{rest}'
    digest = hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()[:16]
    folder = headers.cache() / "mutants" / f"{op}-{digest}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            made = pathlib.Path(scratch) / "made"
            for file, text in texts.items():
                (made / file).parent.mkdir(parents=True, exist_ok=True)
                (made / file).write_text(text)
            try:
                os.rename(made, folder)
            except OSError:  # another process wrote it first
                if not folder.exists():
                    raise
    return folder


def rendered(text: str, numbers: dict[Mutant, int]) -> str:
    """Return the text with each mutant behind its number, without changing line numbers."""
    by_span = collections.defaultdict(list)
    for mutant in numbers:
        by_span[mutant.start, mutant.end].append(mutant)
    spans = sorted(by_span, key=lambda span: (span[0], -span[1]))

    @functools.cache
    def inside(start: int, end: int, first: int) -> tuple[str, int]:
        """Return the text from `start` to `end`, and the index of the first span after it."""
        parts, at, i = [], start, first
        while i < len(spans) and spans[i][1] <= end:
            begin, stop = spans[i]
            parts.append(text[at:begin])
            old, after = inside(begin, stop, i + 1)
            parts.append(_either(old, [(numbers[m], m) for m in by_span[begin, stop]]))
            at, i = stop, after
        return "".join(parts) + text[at:end], i

    return inside(0, len(text), 0)[0]


def _either(old: str, mutants: list[tuple[int, Mutant]]) -> str:
    """Return C++ that is `old` unless one of the mutants, all at this place, is on."""
    if mutants[0][1].is_statement:
        # On one line, because findings name lines of the source.
        each = "".join(f"if (npu_ops_mutated({n})) {{ {' '.join(m.text.split())} }} else "
                       for n, m in mutants)  # fmt: skip
        return f"{{ {each}{{ {old} }} }}"
    each = "".join(f"npu_ops_mutated({n}) ? ({m.text}) : " for n, m in mutants)
    return f"({each}({old}))"
