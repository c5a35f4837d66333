"""Device properties that kernels need. Drivers are queried only when a property is needed.

`is_npu` and the functions it calls never raise: cluster drivers and actors without an NPU call it.
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

# Number of programs per launch in Triton's interpreter. With more than one, tests cover how
# programs share the work items.
_INTERPRETED_PROGRAMS = 3
# Enough programs to keep every multiprocessor of an NVIDIA GPU busy with a memory-bound kernel.
_PROGRAMS_PER_MULTIPROCESSOR = 8


def is_npu() -> bool:
    """Return whether torch can use an NPU here. Never raises, and initializes no device.

    False if torch_npu is not installed, not imported or broken, or if no device is visible, as on a
    cluster driver without CANN. `npu_why_not` gives the reason.
    """
    return npu_why_not() is None


def npu_why_not() -> str | None:
    """Return None, or why there is no usable NPU. Never raises, and initializes no device."""
    try:
        if not hasattr(torch, "npu"):
            if _has("torch_npu"):
                return "torch_npu is installed but not imported (TORCH_DEVICE_BACKEND_AUTOLOAD=0?)"
            return "torch_npu is not installed"
        if torch.npu.is_available() and torch.npu.device_count():
            return None
    except Exception as error:  # any error counts: a broken driver, a CANN of another version, ...
        return f"torch_npu does not work: {type(error).__name__}: {first_line(error)}"
    return "torch_npu sees no device (driver, container or ASCEND_RT_VISIBLE_DEVICES)"


def npu_count() -> int:
    """Return the number of NPUs; 0 wherever `is_npu` is False. Never raises."""
    try:
        return int(torch.npu.device_count()) if is_npu() else 0
    except Exception:
        return 0


def npu_name() -> str | None:
    """Return the SoC name, e.g. Ascend910B3; None without an NPU or on an error. Never raises."""
    if not is_npu():
        return None
    try:
        return str(torch.npu.get_device_name(0))
    except Exception:
        return None


def processor() -> str:
    """Return the name of this machine's CPU."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine() or "unknown")


def first_line(error: Exception) -> str:
    """Return the first line of an error message: torch_npu appends a traceback."""
    return next(iter(str(error).splitlines()), "")


def _has(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # half-installed package
        return False


def is_captured(device: torch.device) -> bool:
    """Return whether a graph is being captured on `device`.

    During capture nothing may wait for the device, and a value read then would be frozen into the
    graph.
    """
    asked = getattr(getattr(torch, device.type, None), "is_current_stream_capturing", None)
    return asked is not None and bool(asked())


def num_vector_cores(device: torch.device) -> int:
    """Return how many programs of a vector kernel run at once on `device`."""
    return _assumed_cores[1] if _assumed_cores else _cores(device, "num_vectorcore")


def num_cube_cores(device: torch.device) -> int:
    """Return how many programs of a matrix kernel run at once on `device`."""
    return _assumed_cores[0] if _assumed_cores else _cores(device, "num_aicore")


_assumed_soc: str | None = None
_assumed_cores: tuple[int, int] | None = None


@contextlib.contextmanager
def as_if_soc(soc: str, cores: tuple[int, int] | None = None) -> Iterator[None]:
    """In a block, choose tiles as for an NPU `soc`, e.g. to compile for it.

    cores: numbers of cube and vector cores to launch on; None: this machine's numbers.
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
    """Return whether `as_if_soc` is active."""
    return _assumed_soc is not None


def soc(device: torch.device) -> str:
    """Return the device's SoC, or the one that `as_if_soc` assumes; "" if the device is no NPU."""
    return _assumed_soc or _soc(device)


def cores_of_a_tile(device: torch.device) -> int:
    """Return how many vector cores split a tile of the matrix unit, each in its own buffer.

    It is 2, but 1 on Ascend950, whose compiler gives the whole tile to one core.
    """
    return 1 if socs.is_ascend950(soc(device)) else 2


def ascend_options(kernel, device: torch.device, **options) -> dict:
    """Return the options to launch `kernel` with; {} on a GPU or in Triton's interpreter."""
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
