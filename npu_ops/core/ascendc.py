"""AscendC kernels: find the built binaries and make their launchers.

An installation with CANN (setup.py) compiles csrc/<op>/<op>_ascendc.cpp for each NPU family and
puts the object file into npu_ops/_ascendc/<family>. The emulated NPU runs the same kernels compiled
for the CPU instead (python/npu_ops_emulator/ascendc.py).
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable

import torch

from npu_ops.core import hardware, library, socs

_FOLDER = pathlib.Path(__file__).parent.parent / "_ascendc"


def locate(op: str, family: str) -> pathlib.Path | str:
    """Return the path of an op's kernel object for an NPU family, or why the file is missing."""
    path = _FOLDER / family / f"{op}.o"
    if path.exists():
        return path
    built = sorted(folder.name for folder in _FOLDER.glob("*") if (folder / f"{op}.o").exists())
    if built:
        return f"its AscendC kernel is built for {', '.join(built)}, not for {family}"
    return "this installation has no AscendC kernels"


def why_not_built(op: str, family: str) -> str | None:
    """Return None, or one sentence on why an NPU family has no kernel object of this op."""
    found = locate(op, family)
    return found if isinstance(found, str) else None


def why_not(op: str, device: torch.device) -> str | None:
    """Return None, or one sentence on why an op's AscendC kernels do not run on `device`.

    Inside `registry.as_if_on("npu")`, `device` may be a CPU. The answer is then for this machine's
    NPU.
    """
    soc = hardware.soc(device) or hardware.npu_name()
    return _missing(op, soc) if soc else f"AscendC kernels run on an NPU, not on {device.type}"


@functools.cache
def _missing(op: str, soc: str) -> str | None:
    if library.native_why_not():
        return library.native_why_not()
    family = socs.ascendc_family(soc)
    if socs.is_ascend950(soc):
        return f"its AscendC kernel was never run with the instructions of {soc}, which differ"
    if family is None:
        return f"there are no AscendC kernels for {soc}"
    return why_not_built(op, family)


def launcher(op: str, name: str, arguments: str) -> Callable[[], Callable[..., None]]:
    """Define the schema of an op's native kernel launcher, and return a function that loads it.

    arguments: the arguments of the operator `name`, in torch's schema syntax.
    """
    target_schema = "str binary, int cores, int ub_bytes, int stream"
    name = library.define(f"{name}_ascendc({arguments}, {target_schema}) -> ()")

    def load():
        from torch_npu._C import _npu_getCurrentRawStream  # also submits torch_npu's queued work

        kernel = getattr(torch.ops.npu_ops, name).default

        def run(*arguments):
            device = arguments[0].device
            kernel(*arguments, *target(op, device), _npu_getCurrentRawStream(device.index))

        return run

    return load


@functools.cache
def target(op: str, device: torch.device) -> tuple[str, int, int]:
    """Return three arguments of a launcher for a device.

    They are `binary` (a path), `cores` (number of vector cores) and `ub_bytes` (bytes of unified
    buffer of a vector core).
    """
    soc = hardware.soc(device)
    cores = torch.npu.get_device_properties(device).vector_core_num
    return str(locate(op, socs.ascendc_family(soc))), cores, socs.ub_bytes(soc)
