"""Run commands on the emulated NPU, in new processes."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
PYTHON = ROOT / "python"


def emulate(*command, options=(), seconds=300, **variables):
    """Run a command on the emulated NPU; return the finished process."""
    path = os.pathsep.join(filter(None, [str(ROOT), str(PYTHON), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-m", "npu_ops_emulator", *options, "--", *command],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "2"} | variables,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
