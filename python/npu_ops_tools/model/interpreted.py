"""Runs kernels whose tensors are all int32 indices, with Triton's interpreter.

Later kernels of the same call read loop bounds from these tensors, and PyTorch operators use them.
"""

from __future__ import annotations

import functools
import io
import os
import subprocess
import sys

import torch

from npu_ops_tools.compile.launches import Launch

# Runs in a subprocess, because the interpreter patches triton.language for its whole process.
_SCRIPT = """
import importlib, io, sys, torch
module, name, grid, arguments = torch.load(io.BytesIO(sys.stdin.buffer.read()))
getattr(importlib.import_module(module), name)[grid](**arguments)
found = io.BytesIO()
torch.save([x for x in arguments.values() if isinstance(x, torch.Tensor)], found)
sys.stdout.buffer.write(found.getvalue())
"""


def has_indices_alone(launch: Launch) -> bool:
    return all(x.dtype == torch.int32 for x in launch.values if isinstance(x, torch.Tensor))


def of_indices(launch: Launch) -> None:
    """Run the kernel of a launch on its tensors, in place, if all of them are int32."""
    if not has_indices_alone(launch):
        return
    arguments = dict(launch.constants)
    arguments |= dict(zip((name for name, _ in launch.signature), launch.values, strict=True))
    tensors = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    numbers = tuple((name, x) for name, x in arguments.items() if name not in tensors)
    before = tuple(
        (name, tuple(x.shape), tuple(x.flatten().tolist())) for name, x in tensors.items()
    )
    function = launch.kernel.fn
    where = function.__module__, function.__name__, tuple(launch.grid)
    for x, result in zip(tensors.values(), _run(*where, numbers, before), strict=True):
        x.copy_(result)


@functools.cache
def _run(module: str, name: str, grid: tuple, numbers: tuple, before: tuple) -> list:
    """Return the tensors after the kernel has run, in the order of its arguments."""
    tensors = {
        argument: torch.tensor(values, dtype=torch.int32, device="cpu").view(shape)
        for argument, shape, values in before
    }
    told = io.BytesIO()
    torch.save((module, name, grid, tensors | dict(numbers)), told)
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], input=told.getvalue(), capture_output=True, check=True,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    return torch.load(io.BytesIO(done.stdout))
