"""Runs tests in a worker process, where Triton launches on the emulated NPU.

A process has one driver, and pytest's own process may interpret Triton kernels.
"""

from __future__ import annotations

import concurrent.futures
import functools
import importlib
import multiprocessing
import os
import pathlib
import sys
import tempfile

_IN_WORKER = "NPU_OPS_TEST_TRITON_WORKER"


def start(folder: pathlib.Path, cache: pathlib.Path) -> None:
    """Make this process a worker that compiles its kernels itself, and caches them in `cache`."""
    os.environ[_IN_WORKER] = "1"
    os.environ["XDG_CACHE_HOME"] = str(cache)
    os.environ["TRITON_DISABLE_LINE_INFO"] = "0"  # parse locations too
    for name in ("TRITON_INTERPRET", "TRITON_CACHE_DIR", "NPU_OPS_EMULATOR"):
        os.environ.pop(name, None)
    sys.path.insert(0, str(folder))
    import torch
    from npu_ops_emulator import triton_driver

    torch.manual_seed(0)
    triton_driver.install(soc="Ascend910B3", vector_cores=48, cube_cores=24)


@functools.cache
def _worker() -> concurrent.futures.Executor:
    cache = pathlib.Path(tempfile.mkdtemp(prefix="npu_ops_triton_"))
    return new_worker(cache)


def new_worker(cache: pathlib.Path) -> concurrent.futures.Executor:
    # `start` runs first in the process, before any module imports Triton.
    return concurrent.futures.ProcessPoolExecutor(
        1,
        multiprocessing.get_context("spawn"),
        initializer=start,
        initargs=(pathlib.Path(__file__).parent, cache),
    )


def call(module: str, name: str, *args, **kwargs):
    return getattr(importlib.import_module(module), name)(*args, **kwargs)


def emulated(test):
    """Decorator: run this test in the worker process."""
    if os.environ.get(_IN_WORKER):
        return test

    @functools.wraps(test)
    def submit(**kwargs):
        _worker().submit(call, test.__module__, test.__name__, **kwargs).result()

    return submit
