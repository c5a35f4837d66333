"""Triton kernels in NPU graphs: csrc/emulator/graph.cpp records and replays their launches."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator

_WORK = ctypes.CFUNCTYPE(ctypes.c_int)
_recorded: list = []  # keeps the callbacks alive: graphs hold their addresses


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the emulated NPU's library; None if Triton kernels run on CPU tensors only."""
    try:
        return ctypes.CDLL("libascendcl.so", mode=os.RTLD_LAZY | os.RTLD_NOLOAD)
    except OSError:
        return None


def record(run: Callable[[], int]) -> None:
    """During a capture, record `run` for replays. `run` returns 0 or an error code."""
    library = _library()
    if library is not None and library.npu_ops_emulator_capturing():
        _recorded.append(_WORK(run))
        library.npu_ops_emulator_record(_recorded[-1])


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Inside the `with` block, allow this thread to wait for its queue, even during a capture."""
    library = _library()
    if library is not None:
        library.npu_ops_emulator_wait(1)
    try:
        yield
    finally:
        if library is not None:
            library.npu_ops_emulator_wait(0)
