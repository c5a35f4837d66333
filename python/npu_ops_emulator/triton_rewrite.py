"""Rewrites a Triton kernel's IR as text, between the vendor's front end and the CPU lowering.

`triton-adapter-opt` prints the text: one operation per line, linalg on tensors, `memref` for global
memory. It is text because the vendor's tools come without MLIR bindings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

HOOK = "npu_ops_access"
MAX_RANK = 8

_BYTES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "bf16": 2, "f16": 2, "f32": 4, "f64": 8}
_VALUE = r"%[\w$.#-]+"
# Synchronisation between cores and pipes. Removed, because one CPU thread runs a whole program.
_BARRIERS = ("gpu.barrier", "hivm.hir.sync_block", "hivm.hir.pipe_barrier")


class Unsupported(Exception):
    """The kernel uses something without a CPU lowering; the message says what."""


class Kernel:
    """The rewritten IR of a kernel.

    Attributes:
        name: of the kernel's function.
        text: the IR to lower.
        parameters: MLIR types of the function's parameters.
        sequential: whether programs must run one after another (it has atomics).
        multiplies: whether it has a product of matrices.
        unwatched: operations on global memory that are neither counted nor checked for bounds.
    """

    def __init__(self, text: str):
        signature = re.search(r"func\.func @(\w+)\((.*)\) attributes \{", text)
        if signature is None:
            raise Unsupported("IR without a kernel")
        self.name = signature[1]
        self.parameters = [t for t, _ in _typed_values(signature[2])]
        self.sequential = "GenericAtomicRMW" in text or "hivm.hir.atomic" in text
        self.multiplies = "linalg.matmul" in text
        self.unwatched: set[str] = set()
        self.text = self._watch(_functions(_calls(_matmuls(_without_barriers(text)))))

    def _watch(self, text: str) -> str:
        """Insert a call of the hook before every access to memory that may be global.

        The hook, npu_ops_access, counts the bytes and checks the bounds.
        """
        out, views, ranks, number = [], {}, set(), 0
        for line in text.splitlines():
            views |= _views(line, views)
            for kind, value, indices in _accesses(line, views, self.unwatched):
                calls, rank = _hook_call(number, kind, value, views[value], indices)
                out += calls
                ranks.add(rank)
                number += 1
            out.append(line)
        declarations = [
            f"  func.func private @{HOOK}_{rank}({_hook_types(rank)})" for rank in sorted(ranks)
        ]
        module = next(i for i, line in enumerate(out) if line.startswith("module"))
        return "\n".join(out[: module + 1] + declarations + out[module + 1 :]) + "\n"


def _without_barriers(text: str) -> str:
    lines = (line for line in text.splitlines() if not line.lstrip().startswith(_BARRIERS))
    return "\n".join(lines) + "\n"


# The standard lowering of a matmul has the reduction as its innermost loop, which LLVM must not
# vectorise. Here the columns are innermost: LLVM vectorises them, and sums keep their order.
_MATMUL = re.compile(
    rf"^(?P<head>\s*{_VALUE} = )linalg\.matmul (?:\{{[^}}]*\}} )?"
    rf"ins\({_VALUE}, {_VALUE} : tensor<[\dx?]+x(?P<in>\w+)>, tensor<[\dx?]+x(?P=in)>\) "
    rf"outs\({_VALUE} : (?P<type>tensor<[\dx?]+x(?P<out>\w+)>)\) -> .*$",
    re.MULTILINE,
)
_MATMUL_MAPS = (
    "{indexing_maps = [affine_map<(d0, d1, d2) -> (d0, d1)>, affine_map<(d0, d1, d2) -> (d1, d2)>, "
    'affine_map<(d0, d1, d2) -> (d0, d2)>], iterator_types = ["parallel", "reduction", "parallel"]}'
)


def _matmuls(text: str) -> str:
    def generic(match: re.Match) -> str:
        narrow, wide = match["in"], match["out"]
        kind = "f" if "f" in wide else "i"
        extend = {"f": "arith.extf", "i": "arith.extsi"}[kind]
        names = ("%lhs", "%rhs")
        body = []
        if narrow != wide:
            body = [f"{n}_wide = {extend} {n} : {narrow} to {wide}" for n in names]
            names = ("%lhs_wide", "%rhs_wide")
        body += [
            f"%product = arith.mul{kind} {names[0]}, {names[1]} : {wide}",
            f"%sum = arith.add{kind} %acc, %product : {wide}",
            f"linalg.yield %sum : {wide}",
        ]
        operands = match[0][match[0].index("ins(") : match[0].rindex(" -> ")]
        return (
            f"{match['head']}linalg.generic {_MATMUL_MAPS} {operands} {{\n"
            f"^bb0(%lhs: {narrow}, %rhs: {narrow}, %acc: {wide}):\n"
            + "\n".join(body)
            + f"\n}} -> {match['type']}"
        )

    return _MATMUL.sub(generic, text)


_CALL = re.compile(
    rf"^\s*(?P<result>{_VALUE}) = (?:func\.)?call @triton_(?P<op>cumsum|cumprod|flip|gather|sort)"
    rf"(?:_\d+)?\((?P<arguments>[^)]*)\) : \(tensor<.*-> tensor<(?P<shape>[\dx]+)x(?P<type>\w+)>"
    r"(?: loc\(.*\))?$",
    re.MULTILINE,
)
# Prints and asserts of a debug build.
_PRINTS = re.compile(r"^.*@triton_(?:print|assert)_\d+\(.*\n", re.MULTILINE)


def _calls(text: str) -> str:
    """Replace calls of whole-tensor functions, left by the vendor's front end, by loops."""
    constants = dict(re.findall(rf"({_VALUE}) = arith\.constant ([-\w]+)", text))

    def body(match: re.Match) -> str:
        source, *rest = (value.strip() for value in match["arguments"].split(","))
        *tensors, axis = [value for value in rest if constants.get(value) not in ("true", "false")]
        flags = [constants[value] == "true" for value in rest if value not in (*tensors, axis)]
        return _Loops(match, source, int(constants[axis])).write(*tensors, *flags)

    text = _PRINTS.sub("", _CALL.sub(body, text))
    declared = r"^\s*func\.func private @triton_(?:cumsum|cumprod|flip|gather|sort)(?:_\d+)?\(.*\n"
    return re.sub(declared, "", text, flags=re.MULTILINE)


class _Loops:
    """Loops over tensors that compute a call's result element by element."""

    def __init__(self, match: re.Match, source: str, axis: int):
        self.operation, self.result, self.source = match["op"], match["result"], source
        self.shape = [int(size) for size in match["shape"].split("x")]
        self.axis = axis % len(self.shape)
        self.element = match["type"]
        self.tensor = f"tensor<{match['shape']}x{self.element}>"
        self.float = not self.element.startswith("i")
        self.name = f"%{self.operation}_{self.result[1:]}"
        self.at = [f"{self.name}_i{d}" for d in range(len(self.shape))]

    def write(self, *arguments) -> str:
        """Write the loops, the axis outermost so that the others vectorise."""
        name = self.name
        order = [self.axis] + [d for d in range(len(self.shape)) if d != self.axis]
        carried = f"{name}_init"
        lines = [
            f"{name}_zero = arith.constant 0 : index",
            f"{name}_one = arith.constant 1 : index",
            f"{name}_last = arith.constant {self.shape[self.axis] - 1} : index",
            f"{carried} = tensor.empty() : {self.tensor}",
        ]
        for depth, d in enumerate(order):
            result = f"{name}_r{depth}" if depth else self.result
            lines += [
                f"{name}_size{d} = arith.constant {self.shape[d]} : index",
                f"{result} = scf.for {self.at[d]} = {name}_zero "
                f"to {name}_size{d} step {name}_one iter_args({name}_t{depth} = {carried}) -> "
                f"({self.tensor}) {{",
            ]
            carried = f"{name}_t{depth}"
        body, where = getattr(self, f"_{self.operation}")(carried, *arguments)
        lines += [
            *body,
            f"{name}_set = tensor.insert {name}_v into {carried}[{where}] : {self.tensor}",
            f"scf.yield {name}_set : {self.tensor}",
            "}",
        ]
        for depth in range(len(order) - 1, 0, -1):
            lines += [f"scf.yield {name}_r{depth} : {self.tensor}", "}"]
        return "\n".join(lines)

    def _place(self, along: str) -> str:
        """Return the loops' indices, with `along` in place of the index along `self.axis`."""
        return ", ".join(along if d == self.axis else i for d, i in enumerate(self.at))

    def _extract(self, name: str, tensor: str, along: str) -> str:
        return f"{self.name}_{name} = tensor.extract {tensor}[{self._place(along)}] : {self.tensor}"

    def _flip(self, carried: str):
        name = self.name
        lines = [
            f"{name}_from = arith.subi {name}_last, {self.at[self.axis]} : index",
            self._extract("v", self.source, f"{name}_from"),
        ]
        return lines, self._place(self.at[self.axis])

    def _gather(self, carried: str, index: str):
        name, shape = self.name, "x".join(map(str, self.shape))
        here = self._place(self.at[self.axis])
        lines = [
            f"{name}_which = tensor.extract {index}[{here}] : tensor<{shape}xi32>",
            f"{name}_from = arith.index_cast {name}_which : i32 to index",
            self._extract("v", self.source, f"{name}_from"),
        ]
        return lines, here

    def _cumsum(self, carried: str, reverse: bool):
        return self._scan(carried, "arith.addf" if self.float else "arith.addi", reverse)

    def _cumprod(self, carried: str, reverse: bool):
        return self._scan(carried, "arith.mulf" if self.float else "arith.muli", reverse)

    def _scan(self, carried: str, combine: str, reverse: bool):
        name, i = self.name, self.at[self.axis]
        # The first element has no predecessor. Read the element itself instead; the select below
        # discards the combined value.
        step, edge, bound = (
            ("addi", "minsi", f"{name}_last") if reverse else ("subi", "maxsi", f"{name}_zero")
        )
        here = f"arith.subi {name}_last, {i}" if reverse else f"arith.addi {i}, {name}_zero"
        lines = [
            f"{name}_here = {here} : index",
            f"{name}_beside = arith.{step} {name}_here, {name}_one : index",
            f"{name}_before = arith.{edge} {name}_beside, {bound} : index",
            self._extract("x", self.source, f"{name}_here"),
            self._extract("y", carried, f"{name}_before"),
            f"{name}_both = {combine} {name}_x, {name}_y : {self.element}",
            f"{name}_first = arith.cmpi eq, {i}, {name}_zero : index",
            f"{name}_v = arith.select {name}_first, {name}_x, {name}_both : {self.element}",
        ]
        return lines, self._place(f"{name}_here")

    def _sort(self, carried: str, descending: bool):
        """Sort: an element's place is the number of elements before it; NaN is the largest."""
        name, i, j = self.name, self.at[self.axis], f"{self.name}_j"
        x, y = (f"{name}_y", f"{name}_v") if descending else (f"{name}_v", f"{name}_y")
        if self.float:
            compare = [
                f"{name}_less = arith.cmpf olt, {y}, {x} : {self.element}",
                f"{name}_equal = arith.cmpf oeq, {y}, {x} : {self.element}",
                f"{name}_nan = arith.cmpf uno, {x}, {x} : {self.element}",
                f"{name}_other = arith.cmpf uno, {y}, {y} : {self.element}",
                f"{name}_ordered = arith.cmpf ord, {y}, {y} : {self.element}",
                f"{name}_top = arith.andi {name}_nan, {name}_ordered : i1",
                f"{name}_tops = arith.andi {name}_nan, {name}_other : i1",
                f"{name}_below = arith.ori {name}_less, {name}_top : i1",
                f"{name}_same = arith.ori {name}_equal, {name}_tops : i1",
            ]
        else:
            compare = [
                f"{name}_below = arith.cmpi slt, {y}, {x} : {self.element}",
                f"{name}_same = arith.cmpi eq, {y}, {x} : {self.element}",
            ]
        lines = [
            self._extract("v", self.source, i),
            f"{name}_place = scf.for {j} = {name}_zero to {name}_size{self.axis} step {name}_one "
            f"iter_args({name}_n = {name}_zero) -> (index) {{",
            self._extract("y", self.source, j),
            *compare,
            f"{name}_earlier = arith.cmpi slt, {j}, {i} : index",
            f"{name}_tie = arith.andi {name}_same, {name}_earlier : i1",
            f"{name}_counts = arith.ori {name}_below, {name}_tie : i1",
            f"{name}_more = arith.addi {name}_n, {name}_one : index",
            f"{name}_next = arith.select {name}_counts, {name}_more, {name}_n : index",
            f"scf.yield {name}_next : index",
            "}",
        ]
        return lines, self._place(f"{name}_place")


# Functions of triton.language.extra.ascend.libdevice in fp32: MLIR lines from %x to %r.
_FUNCTIONS = {
    "recip": ["%one = arith.constant 1.0 : f32", "%r = arith.divf %one, %x : f32"],
    "relu": ["%zero = arith.constant 0.0 : f32", "%r = arith.maximumf %x, %zero : f32"],
    "log1p": ["%r = math.log1p %x : f32"],
    "tan": ["%r = math.tan %x : f32"],
    "atan": ["%r = math.atan %x : f32"],
    "tanh": ["%r = math.tanh %x : f32"],
    "round": ["%r = math.round %x : f32"],
    "pow": ["%r = math.powf %x, %y : f32"],
    "isnan": ["%r = arith.cmpf uno, %x, %x : f32"],
    "isinf": [
        "%top = arith.constant 0x7F800000 : f32",
        "%size = math.absf %x : f32",
        "%r = arith.cmpf oeq, %size, %top : f32",
    ],
}
_FUNCTION = re.compile(
    r"^\s*func\.func private @(?P<name>__hmf_(?P<op>\w+))"
    r"\((?P<types>(?:, |f32|f16|bf16)+)\) -> (?P<out>f32|f16|bf16|i1)\b.*$",
    re.MULTILINE,
)


def _functions(text: str) -> str:
    """Define the device functions that a kernel declares."""

    def define(match: re.Match) -> str:
        operation = re.sub(r"(?<!is)(?:f|Dh)$", "", match["op"])
        operation = match["op"] if match["op"] in _FUNCTIONS else operation
        if operation not in _FUNCTIONS:
            raise Unsupported(f"the device function {match['name']}")
        types = match["types"].split(", ")
        wide = all(t == "f32" for t in types)
        names = ["%x", "%y"][: len(types)]
        parameters = names if wide else [f"{name}_narrow" for name in names]
        lines = [
            f"func.func private @{match['name']}("
            + ", ".join(f"{p}: {t}" for p, t in zip(parameters, types, strict=True))
            + f") -> {match['out']} {{"
        ]
        if not wide:
            lines += [
                f"{name} = arith.extf {p} : {t} to f32"
                for name, p, t in zip(names, parameters, types, strict=True)
            ]
        lines += _FUNCTIONS[operation]
        result = "%r"
        if match["out"] in ("f16", "bf16"):
            lines.append(f"%narrow = arith.truncf %r : f32 to {match['out']}")
            result = "%narrow"
        return "\n".join([*lines, f"return {result} : {match['out']}", "}"])

    return _FUNCTION.sub(define, text)


def _type_at(text: str, start: int) -> str:
    """Return the type that begins at `start`, up to its closing bracket."""
    depth = 0
    for end in range(start, len(text)):
        char = text[end]
        if char == "<":
            depth += 1
        elif char == ">" and text[end - 1] != "-":
            depth -= 1
            if depth == 0:
                return text[start : end + 1]
        elif depth == 0 and char in ",) {":
            return text[start:end]
    return text[start:]


def _typed_values(text: str) -> Iterator[tuple[str, str]]:
    """Yield (type, name) of every `%name: type` in `text`."""
    for match in re.finditer(rf"({_VALUE}): ", text):
        yield _type_at(text, match.end()), match[1]


_VIEW = re.compile(
    rf"^\s*(?P<result>{_VALUE}) = (?P<op>memref\.(?:reinterpret_cast|subview|cast|collapse_shape|"
    rf"expand_shape|transpose|memory_space_cast)|bufferization\.to_(?:memref|buffer)|memref\.alloca?)\b"
)


def _views(line: str, known: dict[str, str]) -> dict[str, str]:
    """Return names that `line` defines and that may be views of global memory, with their types."""
    if "memref<" not in line:
        return {}
    if "func.func @" in line or "^bb" in line:
        return {name: t for t, name in _typed_values(line) if t.startswith("memref<")}
    if "iter_args(" in line:
        return _loop_views(line, known)
    view = _VIEW.match(line)
    if view:
        source = re.search(_VALUE, line[view.end() :])
        if view["op"].startswith(("memref.alloc", "bufferization")) or source[0] not in known:
            known.pop(view["result"], None)
            return {}
        *_, result = re.finditer(r" (?:in)?to (?=memref<)", line)
        return {view["result"]: _type_at(line, result.end())}
    choice = re.match(rf"^\s*({_VALUE}) = (arith\.select|scf\.if)\b", line)
    if choice:
        return {choice[1]: _type_at(line, line.rindex("memref<"))}
    return {}


def _loop_views(line: str, known: dict[str, str]) -> dict[str, str]:
    start = line.index("iter_args(")
    pairs = re.findall(rf"({_VALUE}) = ({_VALUE})", line[start:])
    types, position = [], line.index("-> (", start) + len("-> (")
    while line[position - 1] != ")":
        types.append(_type_at(line, position))
        position += len(types[-1]) + 1
        position += line[position : position + 1] == " "
    found = {}
    result = re.match(rf"^\s*({_VALUE})(?::\d+)? = ", line)
    for i, ((name, init), type_) in enumerate(zip(pairs, types, strict=False)):
        if not type_.startswith("memref<"):
            known.pop(name, None)
        elif init in known:
            found[name] = type_
            found[f"{result[1]}#{i}" if len(types) > 1 else result[1]] = type_
    return found


def _accesses(line: str, views: dict[str, str], unwatched: set[str]):
    """Yield (kind, value, indices or None) for each access of `line` to a view in `views`."""
    used = [value for value in re.findall(_VALUE, line) if value in views]
    if not used or "memref<" not in line:
        return
    operation = re.match(rf"^\s*(?:{_VALUE}(?::\d+)?(?:, {_VALUE})* = )?\"?([\w.]+)", line)[1]
    if operation == "memref.copy":
        source, target = re.findall(_VALUE, line)[:2]
        if source in views:
            yield "read", source, None
        if target in views:
            yield "write", target, None
    elif operation == "bufferization.materialize_in_destination":
        yield "write", used[-1], None
    elif operation == "bufferization.to_tensor":
        yield "read", used[0], None
    elif operation in ("memref.load", "memref.store", "affine.load", "affine.store"):
        kind = "read" if operation.endswith("load") else "write"
        indices = re.search(rf"{re.escape(used[0])}\[([^\]]*)\]", line)[1]
        yield kind, used[0], [i.strip() for i in indices.split(",") if i.strip()]
    elif operation.startswith("linalg."):
        outs = line[line.index("outs(") :]
        for value in dict.fromkeys(used):
            # A read-modify-write counts as one transfer, by the store.
            yield ("write" if re.search(rf"{re.escape(value)}\b", outs) else "read"), value, None
    elif not (
        _VIEW.match(line)
        or operation in ("func.func", "arith.select", "scf.if", "scf.for", "scf.yield", "scf.while")
        or operation in ("scf.condition", "memref.dim", "annotation.mark", "return")
    ):
        unwatched.add(operation)


def _hook_call(number: int, kind: str, value: str, type_: str, indices: list[str] | None):
    """Return lines that call the hook for one access, and the rank of the access."""
    shape, element = re.match(r"memref<((?:[\d?]+x)*)(\w+)", type_).groups()
    rank = shape.count("x")
    if element not in _BYTES or rank > MAX_RANK:
        raise Unsupported(f"an access to {type_}")
    name = f"%npu_ops_{number}"
    sizes = [f"{name}_meta#{2 + i}" for i in range(rank)]
    strides = [f"{name}_meta#{2 + rank + i}" for i in range(rank)]
    index = ", ".join(["index"] * (1 + 2 * rank))
    lines = [
        f"{name}_kind = arith.constant {int(kind == 'write')} : i64",
        f"{name}_bytes = arith.constant {_BYTES[element]} : i64",
        f"{name}_base = memref.extract_aligned_pointer_as_index {value} : {type_} -> index",
        f"{name}_meta:{2 + 2 * rank} = memref.extract_strided_metadata {value} : {type_} -> "
        f"memref<{element}>, {index}",
    ]
    offset = f"{name}_meta#1"
    if indices is not None:
        for i, position in enumerate(indices):
            lines += [
                f"{name}_step{i} = arith.muli {position}, {strides[i]} : index",
                f"{name}_at{i} = arith.addi {offset}, {name}_step{i} : index",
            ]
            offset = f"{name}_at{i}"
        sizes, strides, rank = [], [], 0
    arguments = [f"{name}_kind", f"{name}_bytes", f"{name}_base", offset, *sizes, *strides]
    call = f"func.call @{HOOK}_{rank}({', '.join(arguments)}) : ({_hook_types(rank)}) -> ()"
    return [*lines, call], rank


def _hook_types(rank: int) -> str:
    """Return the hook's parameter types: kind, bytes per element; base, offset, sizes, strides."""
    return ", ".join(["i64", "i64"] + ["index"] * (2 + 2 * rank))
