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
    """Write into the tensors of a launch what its kernel would write; all of them are int32."""
    arguments = dict(launch.constants)
    arguments |= dict(zip((name for name, _ in launch.signature), launch.values, strict=True))
    tensors = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    numbers = tuple((name, x) for name, x in arguments.items() if name not in tensors)
    before = tuple(
        (name, tuple(x.shape), tuple(x.flatten().tolist())) for name, x in tensors.items()
    )
    function = launch.kernel.fn
    where = function.__module__, function.__name__, tuple(launch.grid)
    for x, after in zip(tensors.values(), _after(*where, numbers, before), strict=True):
        x.copy_(after)


@functools.cache
def _after(module: str, name: str, grid: tuple, numbers: tuple, before: tuple) -> list:
    """The tensors, once the kernel has run."""
    tensors = {
        argument: torch.tensor(values, dtype=torch.int32, device="cpu").view(shape)
        for argument, shape, values in before
    }
    told = io.BytesIO()
    torch.save((module, name, grid, tensors | dict(numbers)), told)
    done = subprocess.run(
        [sys.executable, "-c", _RUN], input=told.getvalue(), capture_output=True, check=True,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    return torch.load(io.BytesIO(done.stdout))
