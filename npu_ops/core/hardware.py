"""What the kernels need to know of a device. Nothing is asked of a driver before it is needed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch

# Unified buffer of one vector core, from the vendor's target description.
UB_BYTES = {"Ascend910B": 192 * 1024, "Ascend910_93": 192 * 1024, "Ascend950": 248 * 1024}

# Programs of an interpreted launch: more than one, so that the loop over them is exercised.
_INTERPRETED_PROGRAMS = 3
# Enough programs to keep every multiprocessor of an NVIDIA GPU busy with a memory-bound kernel.
_PROGRAMS_PER_MULTIPROCESSOR = 8


def ub_bytes(soc: str) -> int:
    """Bytes of on-chip memory that one vector core's tiles share.

    Raises:
        ValueError: an SoC that is not known.
    """
    for family, size in UB_BYTES.items():
        if soc.startswith(family):
            return size
    raise ValueError(f"soc: got {soc!r}, needs one of {', '.join(UB_BYTES)}...")


@functools.cache
def num_vector_cores(device: torch.device) -> int:
    """How many programs of a vector kernel run at once on `device`."""
    return _cores(device, "num_vectorcore")


@functools.cache
def num_cube_cores(device: torch.device) -> int:
    """How many programs of a matrix kernel run at once on `device`."""
    return _cores(device, "num_aicore")


_assumed_soc: str | None = None


@contextlib.contextmanager
def as_if_soc(soc: str) -> Iterator[None]:
    """Choose tiles in a block as for an NPU with `soc`, e.g. to compile for it."""
    global _assumed_soc
    before, _assumed_soc = _assumed_soc, soc
    try:
        yield
    finally:
        _assumed_soc = before


def is_ascend950(device: torch.device) -> bool:
    """Whether it is the generation that has a compiler of its own."""
    return (_assumed_soc or _soc(device)).startswith(("Ascend950", "Ascend910_95"))


def cores_of_a_tile(device: torch.device) -> int:
    """How many vector cores share out what the matrix unit hands them, each in a buffer of its own:
    two, but the compiler for Ascend950 gives all to one."""
    return 1 if is_ascend950(device) else 2


def ascend_options(kernel, device: torch.device, **options) -> dict:
    """Launch options of triton-ascend; none on a GPU, nor where Triton interprets `kernel`."""
    compiled = type(kernel).__name__ == "JITFunction"
    return options if compiled and device.type != "cuda" else {}


@functools.cache
def _soc(device: torch.device) -> str:
    if device.type != "npu":
        return ""
    from triton.runtime import driver

    return driver.active.get_current_target().arch


def _cores(device: torch.device, kind: str) -> int:
    if device.type == "npu":
        from triton.runtime import driver

        return driver.active.utils.get_device_properties(device.index or 0)[kind]
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return properties.multi_processor_count * _PROGRAMS_PER_MULTIPROCESSOR
    return _INTERPRETED_PROGRAMS
