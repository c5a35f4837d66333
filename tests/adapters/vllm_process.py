"""Run a module of vllm_npu in another process, on the emulated NPU."""

from __future__ import annotations

import json
import subprocess
import sys

import fetch_vllm
from fetch_vllm import HERE
from processes import environment

SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",  # with it vLLM keeps a Triton that has no device yet
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DISABLE_COMPILE_CACHE": "1",  # compiled models contain functions of npu-ops
    "HF_HUB_OFFLINE": "1",
}
EMULATED = (sys.executable, "-m", "npu_ops_tools", "emulate", "--", "python")


def run(module: str, *arguments, version: str | None, command=(sys.executable,), **changes):
    """Return the lines of JSON that the module prints, and all its output.

    version: run with this vLLM and the transformers that it needs; None: in this environment.

    Raises:
        RuntimeError: it failed; the message is the end of its output.
    """
    folders = fetch_vllm.engine(version) if version else ()
    done = subprocess.run(
        [*command, "-m", f"vllm_npu.{module}", *map(str, arguments)],
        env=environment(*folders, HERE, HERE.parent, **SETTINGS | changes),
        capture_output=True,
        text=True,
    )
    said = done.stdout + done.stderr
    if done.returncode:
        raise RuntimeError(f"vllm_npu.{module} ended with {done.returncode}:\n{said[-6000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')], said
