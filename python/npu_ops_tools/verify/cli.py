"""`npu-ops verify`."""

from __future__ import annotations

import enum
import pathlib
from typing import Annotated

import typer

from npu_ops_tools.options import Modules, Only, check_device, fail


class VerifiedDevice(str, enum.Enum):
    """Devices that can be verified."""

    CPU = "cpu"
    NPU = "npu"
    EMULATED = "npu-emulated"
    CUDA = "cuda"


def verify_command(
    device: Annotated[VerifiedDevice, typer.Option(help="Device to verify.")] = VerifiedDevice.NPU,
    full: Annotated[
        bool, typer.Option("--full/--quick", help="All checks, or those that fit into 5 minutes.")
    ] = False,
    output: Annotated[pathlib.Path, typer.Option(help="Folder for the report.")] = pathlib.Path(
        "report"
    ),
    only: Only = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0, help="Time for all checks; default: 5, or no limit with --full."),
    ] = None,
    limit: Annotated[
        float | None, typer.Option(min=1, help="Seconds for one call before it counts as hung.")
    ] = None,
    modules: Modules = None,
    compare: Annotated[
        tuple[pathlib.Path, pathlib.Path] | None,
        typer.Option(metavar="A.json B.json", help="Compare two reports instead."),
    ] = None,
) -> None:
    """Check every op and implementation on this machine, time them, and write a report to share.

    The exit status is 1 if anything is wrong; with --compare, if something is wrong in B that is
    not wrong in A. Calling it again resumes a stopped run.

    \b
    npu-ops verify                       # on an NPU, 5 minutes
    npu-ops verify --device cpu --only l2norm --minutes 1
    npu-ops verify --compare before/verify.json after/verify.json
    """
    from npu_ops_tools import verify
    from npu_ops_tools.verify import compare as comparing
    from npu_ops_tools.verify import report
    from npu_ops_tools.verify.worker import NoWorker

    try:
        if compare:
            found = comparing.compare(*map(report.read, compare))
            print("\n".join(comparing.lines(found)))
            raise typer.Exit(1 if found["newly wrong"] else 0)
        if device is not VerifiedDevice.EMULATED:
            check_device(device.value)
        options = verify.Options(
            device.value, full, tuple(only or ()), limit, minutes and 60 * minutes,
            tuple(modules or ()),
        )  # fmt: skip
        made = report.scrubbed(verify.run(options, output, lambda line: print(line, flush=True)))
    except (NoWorker, OSError, ValueError) as error:
        fail(error)
    paths = report.write(made, output)
    print(f"{report.summary(made)}\nwritten: {', '.join(map(str, paths))}")
    raise typer.Exit(1 if report.wrong(made) else 0)
