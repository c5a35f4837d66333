"""What a kernel writes, by Triton's interpreter: the next kernel may loop that often."""

from __future__ import annotations

import functools
import io
import os
import subprocess
import sys

import torch

from npu_ops_tools.compile.launches import Launch

# In a process of its own: the interpreter stays in the place of the compiler where it has run.
_RUN = """
import importlib, io, sys, torch
module, name, grid, arguments = torch.load(io.BytesIO(sys.stdin.buffer.read()))
getattr(importlib.import_module(module), name)[grid](**arguments)
found = io.BytesIO()
torch.save([x for x in arguments.values() if isinstance(x, torch.Tensor)], found)
sys.stdout.buffer.write(found.getvalue())
"""


def fill(launch: Launch) -> None:
    """Write into the tensors of a launch what its kernel would write; all of them are outputs."""
    arguments = dict(launch.constants)
    arguments |= dict(zip((name for name, _ in launch.signature), launch.values, strict=True))
    given = {name: x for name, x in arguments.items() if not isinstance(x, torch.Tensor)}
    outputs = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    kinds = tuple((name, tuple(x.shape), x.dtype) for name, x in outputs.items())
    function = launch.kernel.fn
    where = function.__module__, function.__name__, tuple(launch.grid)
    for to, values in zip(
        outputs.values(), _written(*where, tuple(given.items()), kinds), strict=True
    ):
        to.copy_(values)


@functools.cache
def _written(module: str, name: str, grid: tuple, given: tuple, kinds: tuple) -> list:
    outputs = {n: torch.zeros(shape, dtype=dtype, device="cpu") for n, shape, dtype in kinds}
    told = io.BytesIO()
    torch.save((module, name, grid, {**outputs, **dict(given)}), told)
    done = subprocess.run(
        [sys.executable, "-c", _RUN], input=told.getvalue(), capture_output=True, check=True,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    return torch.load(io.BytesIO(done.stdout))
