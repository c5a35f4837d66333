"""What the kernels need to know of a device. Nothing is asked of a driver before it is needed.

`is_npu` and what it rests on never raise: drivers of a cluster and actors without an NPU ask too.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import pathlib
import platform
from collections.abc import Iterator

import torch

from npu_ops.core import epoch, socs

# Programs of an interpreted launch: more than one, so that the loop over them is exercised.
_INTERPRETED_PROGRAMS = 3
# Enough programs to keep every multiprocessor of an NVIDIA GPU busy with a memory-bound kernel.
_PROGRAMS_PER_MULTIPROCESSOR = 8


def is_npu() -> bool:
    """Whether torch has an NPU to use here. Never raises, and starts none.

    False where torch_npu is not installed, was not imported, or is broken, and where no device is
    visible: on the driver of a cluster, without CANN. `npu_why_not` says which it is.
    """
    return npu_why_not() is None


def npu_why_not() -> str | None:
    """None, or a sentence on why there is no NPU to use. Never raises, and starts none."""
    try:
        if not hasattr(torch, "npu"):
            if _has("torch_npu"):
                return "torch_npu is installed and not imported (TORCH_DEVICE_BACKEND_AUTOLOAD=0?)"
            return "torch_npu is not installed"
        if torch.npu.is_available() and torch.npu.device_count():
            return None
    except Exception as error:  # a broken driver, a CANN of another version: anything
        return f"torch_npu does not work: {type(error).__name__}: {first_line(error)}"
    return "torch_npu sees no device (driver, container or ASCEND_RT_VISIBLE_DEVICES)"


def npu_count() -> int:
    """How many NPUs torch has here; 0 wherever `is_npu` is False. Never raises."""
    try:
        return int(torch.npu.device_count()) if is_npu() else 0
    except Exception:
        return 0


def npu_name() -> str | None:
    """The SoC, e.g. Ascend910B3; None without one, or if torch_npu cannot say. Never raises."""
    if not is_npu():
        return None
    try:
        return str(torch.npu.get_device_name(0))
    except Exception:
        return None


def processor() -> str:
    """The name of the processor."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine() or "unknown")


def first_line(error: Exception) -> str:
    """What an error says, without the traceback that torch_npu puts behind it."""
    return next(iter(str(error).splitlines()), "")


def _has(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # half installed
        return False


def is_captured(device: torch.device) -> bool:
    """Whether a graph is being captured on `device`: nothing may wait for it, and what is read
    would be frozen into the graph."""
    asked = getattr(getattr(torch, device.type, None), "is_current_stream_capturing", None)
    return asked is not None and bool(asked())


def num_vector_cores(device: torch.device) -> int:
    """How many programs of a vector kernel run at once on `device`."""
    return _assumed_cores[1] if _assumed_cores else _cores(device, "num_vectorcore")


def num_cube_cores(device: torch.device) -> int:
    """How many programs of a matrix kernel run at once on `device`."""
    return _assumed_cores[0] if _assumed_cores else _cores(device, "num_aicore")


_assumed_soc: str | None = None
_assumed_cores: tuple[int, int] | None = None


@contextlib.contextmanager
def as_if_soc(soc: str, cores: tuple[int, int] | None = None) -> Iterator[None]:
    """Choose tiles in a block as for an NPU with `soc`, e.g. to compile for it.

    cores: cube and vector cores to launch on; None: as many programs as on this machine.
    """
    global _assumed_soc, _assumed_cores
    before = _assumed_soc, _assumed_cores
    _assumed_soc, _assumed_cores = soc, cores
    epoch.advance()
    try:
        yield
    finally:
        _assumed_soc, _assumed_cores = before
        epoch.advance()


def soc_is_assumed() -> bool:
    """Whether `as_if_soc` is in force."""
    return _assumed_soc is not None


def soc(device: torch.device) -> str:
    """Return the SoC of the device, or the one that `as_if_soc` assumes; "" if it is no NPU."""
    return _assumed_soc or _soc(device)


def cores_of_a_tile(device: torch.device) -> int:
    """How many vector cores share out what the matrix unit hands them, each in a buffer of its own:
    two, but the compiler for Ascend950 gives all to one."""
    return 1 if socs.is_ascend950(soc(device)) else 2


def ascend_options(kernel, device: torch.device, **options) -> dict:
    """Launch options of triton-ascend; none on a GPU, nor where Triton interprets `kernel`."""
    compiled = type(kernel).__name__ == "JITFunction"
    return options if compiled and device.type != "cuda" else {}


@functools.cache
def _soc(device: torch.device) -> str:
    return str(torch.npu.get_device_name(device)) if device.type == "npu" else ""


@functools.cache
def _cores(device: torch.device, kind: str) -> int:
    if device.type == "npu":
        from triton.runtime import driver

        return driver.active.utils.get_device_properties(device.index or 0)[kind]
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return properties.multi_processor_count * _PROGRAMS_PER_MULTIPROCESSOR
    return _INTERPRETED_PROGRAMS
