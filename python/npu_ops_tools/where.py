"""Finds the files of an op."""

from __future__ import annotations

import importlib
import pathlib

import npu_ops
from npu_ops.core.registry import Table

ROOT = pathlib.Path(npu_ops.__file__).parent.parent

# The parts of an op, and their places relative to the root of the repository.
PLACES = {
    "public function": "npu_ops/ops/{op}/__init__.py",
    "torch operator": "npu_ops/ops/{op}/op.py",
    "definition": "npu_ops/ops/{op}/reference.py",
    "Triton kernel": "npu_ops/ops/{op}/triton_ascend*",
    "CPU kernel": "csrc/{op}/{op}_cpu.cpp",
    "AscendC kernel": "csrc/{op}/{op}_ascendc.cpp",
    "AscendC tiling": "csrc/{op}/*_tiling.h",
    "AscendC launch": "csrc/{op}/{op}_npu.cpp",
    "cases": "npu_ops/ops/{op}/cases.py",
    "tests": "tests/ops/**/test_{op}.py",
    "benchmark": "benchmarks/bench_{op}.py",
    "adapter": "python/npu_ops_adapters/*/{op}.py",
}


# Folders that a clone of the repository has. An installed package lacks some of them.
_OF_A_CLONE = ("benchmarks", "csrc/common", "npu_ops/ops", "tests/fuzz")


def find_clone() -> pathlib.Path | None:
    """Return the clone that this package runs from, or the one around the working directory, or
    None."""
    here = pathlib.Path.cwd()
    for folder in (ROOT, here, *here.parents):
        if all((folder / part).is_dir() for part in _OF_A_CLONE):
            return folder
    return None


def clone() -> pathlib.Path:
    """Return the clone.

    Raises:
        FileNotFoundError: there is no clone here.
    """
    found = find_clone()
    if found is None:
        here = pathlib.Path.cwd()
        raise FileNotFoundError(f"{here} is not in a clone; run from a clone of the repository")
    return found


def ops() -> dict[str, list[str]]:
    """Return the public functions of each op."""
    names = sorted(path.parent.name for path in (ROOT / "npu_ops/ops").glob("*/op.py"))
    return {name: importlib.import_module(f"npu_ops.ops.{name}").__all__ for name in names}


def implementations(op: str) -> list[str]:
    """Return the implementations of an op, in the order they are tried."""
    return [implementation.name for implementation in Table.tables[op].implementations]


def summaries() -> dict[str, dict]:
    """Return each op's implementations, and the first docstring line of its public functions."""
    return {
        op: {
            "implementations": implementations(op),
            "functions": {
                name: getattr(npu_ops, name).__doc__.partition("\n")[0] for name in functions
            },
        }
        for op, functions in ops().items()
    }


def resolve(name: str) -> str:
    """Return the op called `name`, or with a public function `name`.

    Raises:
        ValueError: there is none.
    """
    known = ops()
    for op, functions in known.items():
        if name == op or name in functions:
            return op
    raise ValueError(f"op: got {name!r}, needs one of {', '.join(known)} or of their functions")


def where(name: str) -> dict[str, list[pathlib.Path]]:
    """Return the parts of an op and their files; an installed package has fewer than a clone."""
    op = resolve(name)
    found = {what: sorted(ROOT.glob(place.format(op=op))) for what, place in PLACES.items()}
    return {what: paths for what, paths in found.items() if paths}
