"""`python -m npu_ops_emulator [options] -- COMMAND...`: run a command on the emulated NPU."""

from __future__ import annotations

import argparse
import os
import shutil
import sys

import npu_ops_emulator
from npu_ops_emulator import EmulatorError, Settings


def main(arguments: list[str] | None = None) -> int:
    """Replaces this process by the command; returns only if it cannot."""
    options = _parse(arguments)
    try:
        if options.status:
            for name, value in npu_ops_emulator.status().items():
                print(f"{name}: {value}")
            return 0
        variables = npu_ops_emulator.environment(_settings(options), options.torch_npu)
    except (EmulatorError, ValueError) as error:
        print(f"npu-ops emulate: {error}", file=sys.stderr)
        return 1
    # `python`, `pytest` and `torchrun` are those of the environment that the emulator belongs to.
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    program = shutil.which(options.command[0], path=path)
    if program is None:
        print(f"npu-ops emulate: {options.command[0]!r} was not found", file=sys.stderr)
        return 127
    sys.stdout.flush()
    os.execve(program, options.command, os.environ | variables | {"PATH": path})


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="npu-ops emulate",
        usage="%(prog)s [options] -- COMMAND...",
        description="Run a command as if this machine had NPUs: the real torch_npu on a runtime in "
        "host memory. It shows that code is right, not that it is fast.",
    )
    parser.add_argument("--devices", type=int, default=default.devices, help="NPUs (%(default)s)")
    parser.add_argument("--soc", default=default.soc, help="chip (%(default)s)")
    parser.add_argument("--memory-gib", type=float, default=default.memory_gib,
                        help="memory of each NPU (%(default)s)")  # fmt: skip
    parser.add_argument("--check-bounds", action="store_true",
                        help="report Triton kernels that leave a tensor")  # fmt: skip
    parser.add_argument("--trace", action="store_true", help="print every operator that runs")
    parser.add_argument("--torch-npu", metavar="PATH", help="the torch_npu wheel, or its folder")
    parser.add_argument("--status", action="store_true", help="say what is built, run nothing")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    # The `--` may be left out, and command lines that pass arguments on often take it away.
    options.command = options.command[options.command[:1] == ["--"] :]
    if not options.command and not options.status:
        parser.error("needs a command after --")
    return options


def _settings(options: argparse.Namespace) -> Settings:
    return Settings(
        options.devices, options.soc, options.memory_gib, options.check_bounds, options.trace
    )


if __name__ == "__main__":
    sys.exit(main())
