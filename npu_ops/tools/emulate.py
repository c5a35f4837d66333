"""`npu-ops emulate [options] -- COMMAND...`: run a command on an emulated NPU."""

from __future__ import annotations

import importlib
import importlib.util
import sys

# By name: imports flow from npu_ops_emulator to npu_ops, never back.
EMULATOR = "npu_ops_emulator"


def main(arguments: list[str]) -> int:
    """Run the emulator's command line; does not return if the command could start."""
    if importlib.util.find_spec(EMULATOR) is None:
        print(
            f"npu-ops emulate: the package {EMULATOR} is not installed; this installation of "
            "npu-ops has the operators alone. Install npu-ops from its repository.",
            file=sys.stderr,
        )
        return 1
    return importlib.import_module(f"{EMULATOR}.__main__").main(arguments)
