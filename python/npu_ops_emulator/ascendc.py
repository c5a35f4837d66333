"""On the emulated NPU, an AscendC kernel's binary is its twin, compiled when it is first wanted."""

from __future__ import annotations

import pathlib
import sys

from npu_ops_emulator import headers, twins


def install() -> None:
    """Let npu_ops find twins where it looks for device objects."""
    kernels = sys.modules["npu_ops.core.ascendc"]
    kernels.locate, kernels.why_not_built = locate, why_not_built


def locate(op: str, family: str) -> pathlib.Path | str:
    """The twin of an op's kernels, or one sentence on why there is none."""
    why_not = why_not_built(op, family)
    return why_not or twins.compile(_source(op), [headers.kernel_sources()]).path


def why_not_built(op: str, family: str) -> str | None:
    """None, or one sentence on why there is no twin. To ask compiles nothing."""
    return headers.why_not() if _source(op).exists() else "it has no AscendC kernel"


def _source(op: str) -> pathlib.Path:
    return headers.kernel_sources() / op / f"{op}_ascendc.cpp"
