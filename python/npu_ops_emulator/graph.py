"""Triton kernels in graphs: csrc/emulator/graph.cpp records their launches, and repeats them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator

_WORK = ctypes.CFUNCTYPE(ctypes.c_int)
_recorded: list = []  # a graph has addresses of these


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The emulated NPU; None where Triton kernels run on CPU tensors alone."""
    try:
        return ctypes.CDLL("libascendcl.so", mode=os.RTLD_LAZY | os.RTLD_NOLOAD)
    except OSError:
        return None


def record(run: Callable[[], int]) -> None:
    """In a capture, `run` is called by each replay; it returns 0, or an error."""
    library = _library()
    if library is not None and library.npu_ops_emulator_capturing():
        _recorded.append(_WORK(run))
        library.npu_ops_emulator_record(_recorded[-1])


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """In it, this thread may wait for its queue, also in a capture."""
    library = _library()
    if library is not None:
        library.npu_ops_emulator_wait(1)
    try:
        yield
    finally:
        if library is not None:
            library.npu_ops_emulator_wait(0)
