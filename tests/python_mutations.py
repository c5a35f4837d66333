"""Mutations of an op's Python files: each changes one place in a module's syntax tree."""

from __future__ import annotations

import ast
import copy
import dataclasses
import pathlib
from collections.abc import Callable, Iterator

ROOT = pathlib.Path(__file__).parents[1]
# Each comparison, and the one that differs from it only at equality.
BOUNDS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
# Methods that copy or convert a tensor. A mutant drops the call.
FORMS = {"contiguous", "to", "float", "clone"}
# Syntax that mutants leave alone, as it computes nothing: messages, annotations, imports.
SKIPPED = (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.arguments)

# Keywords of an operator's declaration: those that are required, and those for device kernels.
REQUIRED = {"takes", "writes", "new", "reference"}
OF_DEVICES = {"ascendc", "aclnn", "fla_npu"}
# An argument of zip that only asserts: valid code does the same without it.
ASSERTING = {"strict"}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of a file.

    place: index of the changed node among `places` of the file's tree.
    which: index of the change among those possible at that node.
    """

    rule: str
    file: str
    line: int
    place: int
    which: int

    @property
    def path(self) -> pathlib.Path:
        return ROOT / self.file

    def made(self) -> tuple[ast.Module, str]:
        """Return the file's tree with the change, and a text "old -> new"."""
        tree = ast.parse(self.path.read_text())
        node = places(tree)[self.place]
        old = short(node)
        new = list(changes(node))[self.which][1](node)
        if new is not node:
            replace(tree, node, ast.copy_location(new, node))
        return ast.fix_missing_locations(tree), f"{old} -> {short(new)}"

    def code(self):
        return compile(self.made()[0], str(self.path), "exec", dont_inherit=True)

    def __str__(self):
        return f"{self.rule}: {self.file}:{self.line}: {self.made()[1]}"


def files(op: str) -> list[pathlib.Path]:
    """Return the op's files that run in one process without a device: no kernels, no cases."""
    found = sorted((ROOT / "npu_ops" / "ops" / op).glob("*.py"))
    elsewhere = {"cases", "aclnn", "fla_npu", "context_parallel"}
    return [path for path in found if "triton" not in path.stem and path.stem not in elsewhere]


def mutants_of(path: pathlib.Path) -> list[Mutant]:
    """Return every mutant of a file, in the order of `places`."""
    file = str(path.relative_to(ROOT))
    return [
        Mutant(rule, file, node.lineno, number, which)
        for number, node in enumerate(places(ast.parse(path.read_text())))
        for which, (rule, _) in enumerate(changes(node))
    ]


def places(tree: ast.AST) -> list[ast.AST]:
    """Return the nodes that mutants may change, always in the same order."""
    found = []

    def walk(node):
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not skipped(child):
                    found.append(child)
                    if not is_negative(child):
                        walk(child)

    walk(tree)
    return [node for node in found if hasattr(node, "lineno")]


def skipped(node: ast.AST) -> bool:
    """Return whether a node is a message, a docstring, `__all__` or a keyword for devices only."""
    of_devices = isinstance(node, ast.keyword) and node.arg in OF_DEVICES
    return isinstance(node, SKIPPED) or of_devices or text(node)


def is_negative(node: ast.AST) -> bool:
    """Return whether a node is a negative constant, which is changed as a whole."""
    match node:
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float())):
            return True
    return False


def text(node: ast.AST) -> bool:
    """Return whether a statement is a docstring or sets `__all__`."""
    names = [x.id for x in getattr(node, "targets", []) if isinstance(x, ast.Name)]
    is_string = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_string or "__all__" in names


Change = Callable[[ast.AST], ast.AST]


def changes(node: ast.AST) -> Iterator[tuple[str, Change]]:
    """Yield the mutations of a node: a rule's name, and a function that changes the node."""
    match node:
        case ast.Expr(value=ast.Call()):
            yield "a call left out", lambda node: ast.Pass()
        case ast.If():
            yield "a condition never met", put("test", constant(False))
            if not isinstance(node.body[0], ast.Raise):
                yield "a condition forgotten", put("test", constant(True))
        case ast.IfExp():
            yield "a condition forgotten", lambda node: node.body
            yield "a condition never met", lambda node: node.orelse
        case ast.BoolOp():
            for i in range(len(node.values)):
                yield "a part of a condition left out", without("values", i)
        case ast.Compare() if len(node.ops) == 1 or all(type(o) in BOUNDS for o in node.ops):
            for i, one in enumerate(node.ops):
                if type(one) in BOUNDS:
                    yield "a bound off by one", put("ops", BOUNDS[type(one)](), i)
        case ast.Constant(value=bool(value)):
            yield "a constant changed", put("value", not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "a constant changed", put("value", value + 1)
        case ast.BinOp() if type(node.op) in ARITHMETIC:
            yield "another operator", put("op", ARITHMETIC[type(node.op)]())
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield "a sign left out", lambda node: node.operand
            # -1 often means "none", as any other negative number does, so move towards 0
            if is_negative(node):
                yield "a constant changed", put("operand", constant(node.operand.value - 1))
        case ast.Call():
            yield from changes_of_call(node)
        case ast.FunctionDef():
            for name, default in defaults(node):
                yield f"the option {name} ignored", ignoring(name, default)


def changes_of_call(node: ast.Call) -> Iterator[tuple[str, Change]]:
    for i, keyword in enumerate(node.keywords):
        if keyword.arg and keyword.arg not in REQUIRED | OF_DEVICES | ASSERTING:
            yield f"{keyword.arg} not passed", without("keywords", i)
    method = node.func.attr if isinstance(node.func, ast.Attribute) else None
    if method in FORMS:
        yield "a form assumed", lambda node: node.func.value
    if method == "stride":
        yield "a stride assumed", contiguous


def contiguous(node: ast.Call) -> ast.Call:
    dense = ast.Call(ast.Attribute(node.func.value, "contiguous", ast.Load()), [], [])
    return ast.Call(ast.Attribute(dense, "stride", ast.Load()), node.args, [])


def constant(value) -> ast.Constant:
    return ast.Constant(value)


def put(field: str, value, index: int | None = None) -> Change:
    def change(node):
        if index is None:
            setattr(node, field, value)
        else:
            getattr(node, field)[index] = value
        return node

    return change


def without(field: str, index: int) -> Change:
    def change(node):
        del getattr(node, field)[index]
        return node.values[0] if field == "values" and len(node.values) == 1 else node

    return change


def defaults(function: ast.FunctionDef) -> Iterator[tuple[str, ast.expr]]:
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    behind = positional[len(positional) - len(given.defaults) :]
    for argument, default in [
        *zip(behind, given.defaults, strict=True),
        *zip(given.kwonlyargs, given.kw_defaults, strict=True),
    ]:
        if default is not None:
            yield argument.arg, default


def ignoring(name: str, default: ast.expr) -> Change:
    """Change a function so that one of its arguments always has its default value."""

    def change(function):
        start = 1 if text(function.body[0]) and len(function.body) > 1 else 0
        forgets = ast.Assign([ast.Name(name, ast.Store())], copy.deepcopy(default))
        function.body.insert(start, ast.copy_location(forgets, function.body[start]))
        return function

    return change


def replace(tree: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, field, new)
                return
            if isinstance(value, list) and any(child is old for child in value):
                setattr(parent, field, [new if child is old else child for child in value])
                return


def short(node: ast.AST) -> str:
    if isinstance(node, ast.FunctionDef):
        return node.name
    if isinstance(node, ast.If):
        return f"if {ast.unparse(node.test)}"
    line = " ".join(ast.unparse(node).split())
    return line if len(line) < 80 else line[:77] + "..."
