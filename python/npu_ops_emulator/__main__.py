"""`npu-ops emulate`, and `python -m npu_ops_emulator`: run a command on the emulated NPU."""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import Annotated

import typer

import npu_ops_emulator
from npu_ops_emulator import EmulatorError, Settings
from npu_ops_emulator import headers as ascendc_headers

# Options after the name of the command belong to the command.
CONTEXT = {"allow_interspersed_args": False}
DEFAULT = Settings()


def emulate(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[--] COMMAND...", help="The command and its arguments."),
    ] = None,
    devices: Annotated[int, typer.Option(help="Number of NPUs.")] = DEFAULT.devices,
    soc: Annotated[str, typer.Option(help="Name of the SoC.")] = DEFAULT.soc,
    memory_gib: Annotated[
        float, typer.Option(help="GiB of memory of each NPU.")
    ] = DEFAULT.memory_gib,
    check_bounds: Annotated[
        bool,
        typer.Option(
            "--check-bounds", help="Report Triton kernels that access memory outside a tensor."
        ),
    ] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Print every operator that runs.")] = False,
    torch_npu: Annotated[
        str | None, typer.Option(metavar="PATH", help="The torch_npu wheel, or a folder of wheels.")
    ] = None,
    headers: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Copy the AscendC headers in FOLDER to the cache."),
    ] = None,
    status: Annotated[
        bool, typer.Option("--status", help="Print which parts are built or missing; run nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --status: print JSON.")] = False,
) -> None:
    """Run a command as if this machine had NPUs: the real torch_npu, on a runtime in host memory.

    It tests that code is right, not that it is fast.
    """
    if headers:
        print(f"AscendC headers: in {_or_fail(lambda: ascendc_headers.keep(headers))}")
    if status:
        _print_status(as_json)
    elif not command and headers:
        return
    elif not command:
        fail("needs a command after --", 2)
    else:
        settings = _or_fail(lambda: Settings(devices, soc, memory_gib, check_bounds, trace))
        _run(command, _or_fail(lambda: npu_ops_emulator.environment(settings, torch_npu)))


def _print_status(as_json: bool) -> None:
    found = npu_ops_emulator.status()
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        print("\n".join(f"{name}: {value}" for name, value in found.items()))


def _run(command: list[str], variables: dict[str, str]) -> None:
    """Replace this process by the command."""
    # `python`, `pytest` and `torchrun` come from the emulator's environment.
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    program = shutil.which(command[0], path=path)
    if program is None:
        fail(f"{command[0]!r} was not found", 127)
    sys.stdout.flush()
    os.execve(program, command, os.environ | variables | {"PATH": path})


def _or_fail(make):
    try:
        return make()
    except (EmulatorError, ValueError) as error:
        fail(str(error), 1)


def fail(sentence: str, code: int) -> None:
    """Print an error to stderr and exit."""
    print(f"npu-ops emulate: {sentence}", file=sys.stderr)
    raise typer.Exit(code)


def main() -> None:
    """Run `python -m npu_ops_emulator`."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(context_settings=CONTEXT)(emulate)
    app()


if __name__ == "__main__":
    main()
