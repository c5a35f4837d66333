"""Parses a kernel that the vendor's compiler printed, into operations and views of memory.

The compiler prints one operation per line, and closes regions on separate lines.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator

BYTES = {
    "f32": 4,
    "i32": 4,
    "bf16": 2,
    "f16": 2,
    "i16": 2,
    "i8": 1,
    "ui8": 1,
    "i64": 8,
    "i1": 1 / 8,
}
Values = tuple


@dataclasses.dataclass(frozen=True)
class View:
    """A view of a memory: shape and strides in elements, None if unknown.

    argument: name of the kernel argument that the view belongs to; "" for on-chip memory.
    offset: in elements from the argument's start.
    """

    shape: Values
    strides: Values
    dtype: str
    space: str
    argument: str = ""
    offset: int | None = 0

    @property
    def known(self) -> bool:
        return None not in self.shape and None not in self.strides

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> float:
        return self.elements * BYTES[self.dtype]

    def runs(self) -> tuple[int, float]:
        """Return the number of contiguous runs, and the bytes of each."""
        run = 1
        for size, stride in reversed(list(zip(self.shape, self.strides, strict=True))):
            if size != 1 and stride != run:
                break
            run *= size
        return (self.elements // run if run else 0), run * BYTES[self.dtype]


@dataclasses.dataclass
class Operation:
    """One operation, with the regions that it opens."""

    name: str
    results: tuple[str, ...]
    text: str
    regions: tuple[list[Operation], ...] = ()


@dataclasses.dataclass
class Function:
    """The code of one kind of core. core: "vector" or "cube"."""

    name: str
    core: str
    arguments: list[tuple[str, str]]
    body: list[Operation]


@dataclasses.dataclass
class Module:
    """A kernel.

    cores: kind of core -> number of such cores in the SoC, according to the compiler.
    pointers: how the kernel uses each tensor: "input", "output" or "both".
    """

    maps: dict[str, Callable]
    functions: list[Function]
    cores: dict[str, int]
    pointers: tuple[str, ...]

    @property
    def core(self) -> str:
        """The kind of core that the kernel runs on: "vector", "cube" or "mixed"."""
        kinds = {function.core for function in self.functions}
        return kinds.pop() if len(kinds) == 1 else "mixed"


def parse(text: str) -> Module:
    """Parse the compiler's output.

    Raises:
        ValueError: there is no device function in it.
    """
    lines = iter([line.strip() for line in text.splitlines()])
    functions = [found for line in lines if (found := _function(line, lines))]
    if not functions:
        raise ValueError("hivm: got no device function, needs one")
    return Module(_maps(text), functions, _cores(text), _pointers(text))


def _function(line: str, lines: Iterator[str]) -> Function | None:
    if not line.startswith("func.func @") or not line.endswith("{"):
        return None
    body, _ = _block(lines)
    if "function_kind<HOST>" in line:
        return None
    name = re.match(r"func\.func @([\w$.]+)", line)[1]
    core = "cube" if "func_core_type<AIC>" in line else "vector"
    arguments = re.findall(r"(%arg\d+): (memref<(?:[^<>]|<[^<>]*>)*>|\w+)", line)
    return Function(name, core, arguments, body)


def _block(lines: Iterator[str]) -> tuple[list[Operation], str]:
    """Parse operations up to the closing brace; return them, and the line of that brace."""
    found = []
    for line in lines:
        if line.startswith("}"):
            return found, line
        if line:
            found.append(_operation(line, lines))
    return found, "}"


def _operation(line: str, lines: Iterator[str]) -> Operation:
    left, equals, right = line.partition(" = ")
    if not equals or not left.startswith("%"):
        left, right = "", line
    regions = []
    while line.endswith("{"):
        body, line = _block(lines)
        regions.append(body)
    name = re.match(r"[\w.]+", right)[0]
    return Operation(name, tuple(_results(left)), right[len(name) :].strip(), tuple(regions))


def _results(left: str) -> Iterator[str]:
    """Yield the names in "%5", "%5, %6" and "%5:2"."""
    for name in filter(None, left.split(", ")):
        base, _, count = name.partition(":")
        yield from (f"{base}#{i}" for i in range(int(count))) if count else [base]


def _pointers(text: str) -> tuple[str, ...]:
    """Return how the first device function uses each tensor.

    If the compiler does not say: "input" for a tensor that no function uses, else "both".
    """
    heads = [line for line in text.splitlines() if "function_kind<DEVICE>" in line]
    bodies = (line for line in text.splitlines() if line not in heads)
    used = set(re.findall(r"%arg\d+", "".join(bodies)))
    found = re.findall(r"(%arg\d+): memref<[^{]*?>>?(?: (\{[^}]*\}))?(?=, %|\))", heads[0])
    kinds = {"0": "input", "1": "output", "2": "both"}
    said = {
        name: re.search(r"tensor_kind = (\d)", of) for name, of in found if "arg_type" not in of
    }
    return tuple(
        kinds[kind[1]] if kind else "both" if name in used else "input"
        for name, kind in said.items()
    )


def _cores(text: str) -> dict[str, int]:
    found = dict(re.findall(r'"(CUBE|VECTOR)_CORE_COUNT", (\d+)', text))
    return {kind.lower(): int(count) for kind, count in found.items()}


def _maps(text: str) -> dict[str, Callable]:
    """Turn MLIR's affine maps into Python functions, by name: {"#map1": lambda d0: (...,)}."""
    found = {}
    pattern = r"^(#map\d*) = affine_map<\(([^)]*)\)(?:\[([^\]]*)\])? -> \((.*)\)>$"
    for name, dims, symbols, body in re.findall(pattern, text, re.M):
        arguments = ", ".join(filter(None, (dims, symbols)))
        found[name] = eval(f"lambda {arguments}: ({_python(body)},)", {"ceildiv": _ceildiv})
    return found


def _ceildiv(a: int, b: int) -> int:
    return -(-a // b)


def _python(body: str) -> str:
    """Translate an affine expression to Python; all operators except ceildiv are only renamed."""
    body = body.replace("floordiv", "//").replace(" mod ", " % ")
    operand = r"(\w+|\((?:[^()]|\([^()]*\))*\))"
    while " ceildiv " in body:
        body, count = re.subn(rf"{operand} ceildiv {operand}", r"ceildiv(\1, \2)", body)
        if not count:
            raise ValueError(f"affine map: got {body!r}, needs operands of at most two brackets")
    return body


@functools.cache
def view_type(text: str) -> View | None:
    """Parse "memref<4x?xf32, strided<[?, 1], offset: ?>, #hivm.address_space<ub>>"."""
    found = re.search(
        r"memref<((?:(?:\d+|\?)x)*)(\w+)(?:, strided<\[([^\]]*)\](?:, offset: [^>]*)?>)?"
        r"(?:, #hivm\.address_space<(\w+)>)?>",
        text,
    )
    if not found:
        return None
    shape = tuple(_known(size) for size in found[1].split("x") if size)
    strides = dense(shape) if found[3] is None else tuple(map(_known, _items(found[3])))
    return View(shape, strides, found[2], found[4] or "gm")


def _known(text: str) -> int | None:
    return None if text.strip() == "?" else int(text)


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def dense(shape: Values) -> Values:
    """Return the strides of a contiguous tensor; None outside a dimension of unknown size."""
    strides, run = [], 1
    for size in reversed(shape):
        strides.insert(0, run)
        run = None if run is None or size is None else run * size
    return tuple(strides)
