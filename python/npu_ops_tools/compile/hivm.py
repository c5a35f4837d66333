"""Parses HIVM, the vendor's last dialect: the compiled form of a kernel.

The compiler prints one operation per line, and indents regions.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

BYTES = {"f32": 4, "i32": 4, "bf16": 2, "f16": 2, "i16": 2, "i8": 1, "i64": 8, "i1": 1 / 8}
SPACES = {"ub": "ub", "cbuf": "l1", "ca": "l0a", "cb": "l0b", "cc": "l0c"}
_CORES = {"AIV": "vector", "AIC": "cube", "MIX": "mixed"}


@dataclasses.dataclass(frozen=True)
class LoopBody:
    """The instructions of one iteration of a loop, without its inner loops.

    depth: 0 for the kernel's own body, 1 for a loop in it, and so on.
    vector, cube, loads, stores: numbers of instructions, as the compiler names them.
    loaded, stored: bytes moved from and to global memory; masked tiles count in full.
    """

    source: str
    depth: int
    vector: int
    cube: int
    loads: int
    stores: int
    loaded: int
    stored: int


@dataclasses.dataclass
class _Body:
    source: str
    depth: int
    indent: int
    variable: str = ""
    counts: dict = dataclasses.field(
        default_factory=lambda: dict.fromkeys(
            ("vector", "cube", "loads", "stores", "loaded", "stored"), 0
        )
    )


def core(hivm: str) -> str:
    """Return the kind of core that the kernel runs on: "vector", "cube" or "mixed"."""
    found = re.search(r"module_core_type<(\w+)>", hivm)
    return _CORES[found[1]] if found else "vector"


def on_chip_bytes(hivm: str) -> dict[str, int]:
    """Return the end of the highest buffer in each on-chip memory, in bytes.

    L0A and L0B are used inside the matrix instruction, and the compiler does not place them.
    """
    highest = dict.fromkeys(SPACES.values(), 0)
    placed = r"pointer_cast\(([^)]*)\)[^\n]*?memref<((?:\d+x)*)(\w+), #hivm.address_space<(\w+)>>"
    for function in functions(hivm):
        found = re.findall(r"(%\w+) = arith.constant (\d+) : i64", function)
        constants = {name: int(value) for name, value in found}
        for offsets, shape, dtype, space in re.findall(placed, function):
            for offset in offsets.split(","):
                end = constants.get(offset.strip(), 0) + _size(shape, dtype)
                highest[SPACES[space]] = max(highest[SPACES[space]], end)
    return highest


def functions(hivm: str) -> list[str]:
    """Return the text of each function that has a body."""
    starts = [m.start() for m in re.finditer(r"^  func\.func (?!private)", hivm, re.M)]
    return [hivm[a:b] for a, b in zip(starts, [*starts[1:], len(hivm)], strict=True)]


def keeps_multi_buffer(hivm: str, notes: tuple[str, ...]) -> bool:
    """Return whether the kernel is multi-buffered: a buffer alternates between two addresses.

    Also True if no loop moves data to or from global memory, because nothing can overlap. False if
    the compiler's notes say that it gave up multi-buffering.
    """
    given_up = any("multi-buffer" in note for note in notes)
    alternates = re.search(r"arith\.select %\w+, %\w+, %\w+ : memref<[^\n]*<(ub|cbuf|cc)>", hivm)
    moves = any(body.depth and body.loads + body.stores for body in loop_bodies(hivm))
    return not given_up and (alternates is not None or not moves)


def scalar_loops(hivm: str) -> list[str]:
    """Return the source lines of loops over single elements, which are scalarized vector work."""
    table = _locations(hivm)
    found = {}
    for function in functions(hivm):
        for line, bodies in _walk(function, table):
            element = re.search(r"memref\.(?:load|store) .*?\[([^\]]*)\]", line)
            if element and bodies[-1].variable in re.findall(r"%\w+", element[1]):
                found.setdefault(id(bodies[-1]), (bodies[-1], _source(line, table)))
    return [source for _, source in found.values()]


def loop_bodies(hivm: str) -> list[LoopBody]:
    """Return the kernel's loop bodies in the order of the code."""
    table = _locations(hivm)
    found: dict[int, _Body] = {}
    for function in functions(hivm):
        sizes: dict[str, int] = {}
        for line, bodies in _walk(function, table):
            found[id(bodies[-1])] = bodies[-1]
            _remember_size(line, sizes)
            _count(line, bodies[-1].counts, sizes)
    return [
        LoopBody(body.source, body.depth, **body.counts)
        for body in found.values()
        if any(body.counts.values())
    ]


def _walk(function: str, table: dict[str, str]) -> Iterator[tuple[str, list[_Body]]]:
    """Yield each line, and the loops around it from the outside in."""
    bodies = [_Body("", 0, -1)]
    for line in function.splitlines():
        indent = len(line) - len(line.lstrip())
        while line.strip() and indent <= bodies[-1].indent:
            closed = bodies.pop()
            closed.source = _source(line, table)
        yield line, bodies
        loop = re.search(r"scf\.(?:for (%\w+) =|while\b)", line)
        if loop:
            bodies.append(_Body("", len(bodies), indent, loop[1] or ""))


def _count(line: str, counts: dict, sizes: dict[str, int]) -> None:
    call = re.search(r"\bcall @(\w+)\(([^)]*)\)", line)
    if not call:
        return
    name, operands = call[1], re.findall(r"%[\w#]+", call[2])
    moved = max((sizes.get(operand, 0) for operand in operands[:2]), default=0)
    if name.startswith(("load_gm", "nd2nz")):
        counts["loads"] += 1
        counts["loaded"] += moved
    elif "_to_gm" in name or name.startswith("fixpipe"):
        counts["stores"] += 1
        counts["stored"] += moved
    else:
        counts["cube" if name.startswith("mma") else "vector"] += 1


def _remember_size(line: str, sizes: dict[str, int]) -> None:
    """Store the size of a view in bytes. Without a static shape, it has the size of its source."""
    made = re.match(r"\s*(%[\w#]+) = (?:hivm\.hir|memref|arith)\.(\w+)", line)
    if not made:
        return
    typed = re.findall(r"memref<((?:\d+x)+)(\w+)[,>]", line.rpartition(" : ")[2])
    if typed:
        sizes[made[1]] = _size(*typed[-1])
        return
    source = re.search(r"\.(?:cast|subview|collapse_shape|expand_shape|reinterpret_cast) (%[\w#]+)",
                       line)  # fmt: skip
    if source and source[1] in sizes:
        sizes[made[1]] = sizes[source[1]]


def _size(shape: str, dtype: str) -> int:
    elements = 1
    for size in filter(None, shape.split("x")):
        elements *= int(size)
    return int(elements * BYTES.get(dtype, 4))


def _locations(hivm: str) -> dict[str, str]:
    """Map #locN to "file:line", or "file:line called from file:line"."""
    raw = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", hivm, re.M))

    def named(text: str, depth: int = 0) -> str:
        text = text.strip()
        if text in raw and depth < 20:
            return named(raw[text], depth + 1)
        call = re.match(r"callsite\((.*) at (.*)\)$", text)
        if call:
            return f"{named(call[1], depth + 1)} called from {named(call[2], depth + 1)}"
        inner = re.match(r'"[^"]*"\((#loc\d*)\)$', text)
        if inner:
            return named(inner[1], depth + 1)
        place = re.match(r'"(.*)":(\d+):\d+$', text)
        return f"{place[1].rpartition('/')[2]}:{place[2]}" if place else "unknown"

    return {name: named(name) for name in raw}


def _source(line: str, table: dict[str, str]) -> str:
    """Return the source line of the operation on a line."""
    mark = re.search(r"loc\((#loc\d*)\)\s*$", line)
    return table.get(mark[1], "unknown") if mark else "unknown"
