"""Compile Triton kernels with the vendor's compiler, without an NPU, and report on the result.

The report covers on-chip memory, multi-buffering, instructions, and work that fell back to scalars.

    report = compile_kernel(kernel, {"x": "*bf16", "n": "i32"}, {"BLOCK": 1024})
    assert not report.faults(), report

The command: `npu-ops compile --help`.
"""

from __future__ import annotations

from npu_ops_emulator.vendor import SOCS, CompileError, versions

from npu_ops_tools.compile.hivm import LoopBody
from npu_ops_tools.compile.launches import Launch, launches
from npu_ops_tools.compile.report import CompileReport, compile_kernel, compile_launch

__all__ = [
    "SOCS",
    "CompileError",
    "CompileReport",
    "Launch",
    "LoopBody",
    "compile_kernel",
    "compile_launch",
    "launches",
    "versions",
]
