"""On the emulated NPU, an AscendC kernel's binary is its twin, compiled when it is first wanted."""

from __future__ import annotations

import pathlib
import sys

from npu_ops_emulator import headers, twins


def install() -> None:
    """Let npu_ops find twins where it looks for device objects."""
    sys.modules["npu_ops.core.ascendc"].locate = locate


def locate(op: str, family: str) -> pathlib.Path | str:
    """The twin of an op's kernels, or one sentence on why there is none."""
    source = headers.kernel_sources() / op / f"{op}_ascendc.cpp"
    if not source.exists():
        return "it has no AscendC kernel"
    why_not = headers.why_not()
    return why_not or twins.compile(source, [headers.kernel_sources()]).path
