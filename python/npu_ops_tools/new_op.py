"""`npu-ops new-op`: writes the files of a row-wise op, which build and pass their tests."""

from __future__ import annotations

import importlib.resources
import keyword
import os
import pathlib
import re
import shutil
import subprocess
import sys

from npu_ops_tools.where import ops

# template -> the file written from it, relative to the root of the repository.
FILES = {
    "init.py": "npu_ops/ops/{op}/__init__.py",
    "op.py": "npu_ops/ops/{op}/op.py",
    "reference.py": "npu_ops/ops/{op}/reference.py",
    "cases.py": "npu_ops/ops/{op}/cases.py",
    "triton_ascend.py": "npu_ops/ops/{op}/triton_ascend.py",
    "cpu.cpp": "csrc/{op}/{op}_cpu.cpp",
    "test.py": "tests/ops/test_{op}.py",
    "bench.py": "benchmarks/bench_{op}.py",
    "fuzz.py": "tests/fuzz/ops/{op}.py",
}
FORMATTERS = {".py": ("ruff", "format", "--quiet"), ".cpp": ("clang-format", "-i")}
BIN = pathlib.Path(sys.executable).parent
NEXT = """\
next, in this order (CONTRIBUTING.md, "Adding an op"):
  reference.py, its test and the formula in tests/fuzz, which must not be copies of each other
  op.py, cases.py and the public function
  the kernels: python setup.py build_ext --inplace, npu-ops compile {op} --suggest-tile
"""


def write(op: str, root: pathlib.Path) -> list[pathlib.Path]:
    """Write the files of a new op to a clone of the repository; return their relative paths.

    They compute RMS norm, with a gradient, until you change them.

    Raises:
        ValueError: `op` is not a valid name, or the op exists already.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", op) or keyword.iskeyword(op):
        raise ValueError(f"name: got {op!r}, needs lower-case letters, digits and underscores")
    paths = {template: pathlib.Path(place.format(op=op)) for template, place in FILES.items()}
    there = [str(path) for path in paths.values() if (root / path).exists()]
    if op in ops() or there:
        raise ValueError(f"name: got {op!r}, needs a name without existing files ({there})")
    templates = importlib.resources.files("npu_ops_tools") / "templates" / "new_op"
    for template, path in paths.items():
        text = (templates / f"{template}.txt").read_text()
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text.replace("NAME", op))
    _format([root / path for path in paths.values()])
    return list(paths.values())


def _format(paths: list[pathlib.Path]) -> None:
    """Format the files for `make check`: line breaks depend on the name. Needs `npu-ops[check]`."""
    for suffix, command in (
        (".py", ["ruff", "format", "--quiet"]),
        (".cpp", ["clang-format", "-i"]),
    ):
        tool = shutil.which(command[0], path=f"{BIN}{os.pathsep}{os.environ['PATH']}")
        if tool:
            chosen = [path for path in paths if path.suffix == suffix]
            subprocess.run([tool, *command[1:], *chosen], check=True)
