"""`npu-ops tune`."""

from __future__ import annotations

import enum
import pathlib
from typing import Annotated

import typer

from npu_ops.core import preferences
from npu_ops_tools.options import AsJson, Modules, Only, check_device, fail, print_json


class TunedDevice(str, enum.Enum):
    """Devices with meaningful times."""

    CPU = "cpu"
    NPU = "npu"
    CUDA = "cuda"


def tune_command(
    device: Annotated[TunedDevice, typer.Option(help="Device to tune for.")] = TunedDevice.NPU,
    only: Only = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="Model whose shapes to time; may be repeated; default: three."),
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Number of tokens; may be repeated; default: 1 to thousands."),
    ] = None,
    limit: Annotated[
        float, typer.Option(min=1, help="Seconds for one call before it counts as hung.")
    ] = 120.0,
    export: Annotated[
        pathlib.Path | None,
        typer.Option(help="Also write the table to this folder. Alone: export the current table."),
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Show the current table.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Remove your table.")] = False,
    modules: Modules = None,
    as_json: AsJson = False,
) -> None:
    """Time the implementations whose results are right, and prefer the fastest from now on.

    The table is for this SoC, in the user's cache, and is read when npu-ops is next imported. All
    ranks of a job need the same table: --export it, and put the file on every machine.

    \b
    npu-ops tune                        # on an NPU
    npu-ops tune --device cpu --only l2norm --tokens 64
    npu-ops tune --device cpu --show
    """
    from npu_ops_tools.verify.worker import NoWorker

    try:
        if remove:
            _remove(device.value)
        elif show or (export and not (only or model or tokens)):
            _show(device.value, export, as_json)
        else:
            settings = (only or [], model or [], tokens or [])
            _tune(device.value, settings, modules or [], limit, export, as_json)
    except (NoWorker, OSError, ValueError) as error:
        fail(error)


def _tune(
    device: str, settings: tuple, modules: list[str], limit: float, export, as_json: bool
) -> None:
    from npu_ops_tools import tune
    from npu_ops_tools.verify import child, report, runs

    soc, folder = _soc(device), preferences.cache()
    if folder is None:
        raise FileNotFoundError("this user has no home folder for the table; set XDG_CACHE_HOME")
    results = tune.measure(
        device, tune.plan(device, *settings), modules, limit,
        lambda job, result: as_json or print(runs.line(job.name, result), flush=True),
    )  # fmt: skip
    rows = tune.rows(results)
    if not rows:
        raise ValueError(
            "no timed implementation gives right results here; npu-ops verify says what is wrong"
        )
    made = report.scrubbed(tune.table(soc, rows, child.environment(device)))
    written = [tune.write(made, place) for place in filter(None, (folder, export))]
    if as_json:
        print_json(made)
        return
    print("\n".join(f"written: {path}" for path in written))
    print("\n".join(tune.lines(rows)))


def _show(device: str, export: pathlib.Path | None, as_json: bool) -> None:
    from npu_ops_tools import tune

    found = {"soc": _soc(device), "made": "date unknown"} | preferences.read(_path(device))
    written = export and tune.write(found, export)
    if as_json:
        print_json(found)
        return
    print(f"{found['soc']}, {found['made']}: {_path(device)}")
    print("\n".join(tune.lines(found["rows"])))
    if written:
        print(f"written: {written}")


def _remove(device: str) -> None:
    path = _path(device)
    if path.parent == preferences.PACKAGED:
        raise ValueError(f"{path} is part of the package; the user has no table to remove")
    path.unlink()
    print(f"removed: {path}")


def _path(device: str) -> pathlib.Path:
    path = preferences.path_of(device)
    if path is None:
        raise FileNotFoundError(f"there is no table for {_soc(device)}; npu-ops tune makes one")
    return path


def _soc(device: str) -> str:
    check_device(device)
    soc = preferences.soc_of(device)
    if soc is None:
        raise ValueError(f"device: {device} reports no model name, so it cannot have its own table")
    return soc
