"""Run a module of sglang_cpu in another process, in SGLang's environment."""

from __future__ import annotations

import collections
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import fetch_sglang
from fetch_sglang import HERE

# A line that NPU_OPS_LOG=calls prints: "rope(float32[7, 4, 64]@cpu, ...) -> cpu".
CALL = re.compile(r"\b([a-z_0-9]+)\([a-z0-9]+\[.*\) -> (\w+)$", re.M)


def environment(*first, **changes) -> dict[str, str]:
    """Return this process's environment, with `first` and then SGLang first on the path."""
    before = filter(None, [os.environ.get("PYTHONPATH")])
    path = [*first, fetch_sglang.tree(), HERE, HERE.parent, *before]
    settings = {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "SGLANG_PLATFORM": "sglang_cpu",
        "OMP_NUM_THREADS": "1",
    }
    return os.environ | settings | changes


def on_npu(folder: pathlib.Path) -> dict:
    """Return settings with which `run` uses the emulated NPU, SGLang's platform and triton-ascend.

    folder: gets a link to triton-ascend's triton, which SGLang's environment hides.
    """
    triton = importlib.util.find_spec("triton").submodule_search_locations[0]
    (folder / "triton").symlink_to(triton)
    settings = {
        "SGLANG_PLATFORM": "sglang_npu",
        "SGLANG_MAMBA_CONV_DTYPE": "float16",  # SGLang needs it for fp16 models
        "SGLANG_NPU_DISABLE_ACL_FORMAT_WEIGHT": "1",  # the emulator has no vendor formats
    }
    emulated = [sys.executable, "-m", "npu_ops_tools", "emulate", "--", "python"]
    return {"first": [folder, fetch_sglang.tree()], "command": emulated} | settings


def run(module: str, *arguments, first=(), command=(sys.executable,), **changes):
    """Return the lines of JSON that the module prints, and all output of its processes.

    Raises:
        RuntimeError: the process failed; the message is the end of its output.
    """
    done = subprocess.run(
        [*command, "-m", f"sglang_cpu.{module}", *map(str, arguments)],
        env=environment(*first, **changes),
        capture_output=True,
        text=True,
    )
    said = done.stdout + done.stderr
    if done.returncode:
        raise RuntimeError(f"sglang_cpu.{module} ended with {done.returncode}:\n{said[-6000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')], said


def calls(said: str) -> collections.Counter:
    """Return how often each (op, implementation) ran, from the output of NPU_OPS_LOG=calls."""
    return collections.Counter(CALL.findall(said))
