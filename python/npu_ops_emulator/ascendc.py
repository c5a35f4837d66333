"""Runs AscendC kernels on the emulated NPU.

The kernel's source is compiled for the CPU on first use. The result is called the kernel's twin.
"""

from __future__ import annotations

import pathlib
import sys

from npu_ops_emulator import headers, twins


def install() -> None:
    """Make npu_ops load twins instead of kernels compiled for the NPU."""
    kernels = sys.modules["npu_ops.core.ascendc"]
    kernels.locate, kernels.why_not_built = locate, why_not_built


def locate(op: str, family: str) -> pathlib.Path | str:
    """Return the path of the twin of an op's kernels, or why there is none."""
    why_not = why_not_built(op, family)
    return why_not or twins.compile(_source(op), [headers.kernel_sources()]).path


def why_not_built(op: str, family: str) -> str | None:
    """Return None, or why there is no twin. Compiles nothing."""
    return headers.why_not() if _source(op).exists() else "this op has no AscendC kernel"


def _source(op: str) -> pathlib.Path:
    return headers.kernel_sources() / op / f"{op}_ascendc.cpp"
