"""Rules for the source of Triton kernels that no available compiler checks."""

import ast
import itertools
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FILES = sorted(ROOT.glob("npu_ops/**/*triton_ascend*.py")) + sorted(
    ROOT.glob("npu_ops/**/triton_ascend/*.py")
)


def kernels(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            if any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                yield node


def names_to_names(node):
    """Yield (line, target, value) for each assignment of one name to another within `node`."""
    for assign in ast.walk(node):
        if isinstance(assign, ast.Assign):
            for target in assign.targets:
                pairs = [(target, assign.value)]
                if isinstance(target, ast.Tuple) and isinstance(assign.value, ast.Tuple):
                    pairs = zip(target.elts, assign.value.elts, strict=True)
                for to, value in pairs:
                    if isinstance(to, ast.Name) and isinstance(value, ast.Name):
                        yield assign.lineno, to.id, value.id


def passed_on_from_one_start(source):
    """Yield (kernel, target, value) for names that a loop assigns and that start as one value.

    Triton 3.6 visits a loop's body once to learn which names the loop changes. If a name still has
    its old value after this visit, Triton takes it for a constant of the loop, without an error.
    Example: after `a, b = zero, zero`, a loop of `b, a = a, new` keeps b at zero.
    """
    for kernel in kernels(source):
        for loop in ast.walk(kernel):
            if not isinstance(loop, (ast.For, ast.While)):
                continue
            starts = {}
            for line, name, value in names_to_names(kernel):
                if line < loop.lineno:
                    starts[name] = starts.get(value, value)
            for _, to, value in names_to_names(loop):
                if to != value and starts.get(to, to) == starts.get(value, value):
                    yield kernel.name, to, value


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_that_a_loop_passes_on_start_as_values_of_their_own(path):
    assert list(passed_on_from_one_start(path.read_text())) == []


@pytest.mark.parametrize(
    "start, found",
    [
        ("a, b = zero, zero", [("kernel", "b", "a")]),
        ("a = zero\n    b = a", [("kernel", "b", "a")]),
        ("a, b = tl.zeros((4,)), tl.zeros((4,))", []),
    ],
)
def test_names_that_start_as_one_value_are_found(start, found):
    source = (
        f"@triton.jit\ndef kernel(x):\n    {start}\n    for i in range(9):\n        b, a = a, i"
    )
    assert list(passed_on_from_one_start(source)) == found


def test_all_kernels_are_looked_at():
    found = itertools.chain.from_iterable(kernels(path.read_text()) for path in FILES)
    assert len(list(found)) > 100
