"""`npu-ops report`."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from npu_ops_tools.options import fail


def report_command(
    results: Annotated[
        list[pathlib.Path],
        typer.Argument(help="Files or folders that `npu-ops bench` wrote; or one verify.json."),
    ],
    output: Annotated[
        pathlib.Path, typer.Option("--output", "-o", help="Folder for the report.")
    ] = pathlib.Path("report"),
) -> None:
    """Make a page of benchmark results, index.html, with report.md beside it.

    For a verify.json of `npu-ops verify`, make its page again.
    """
    from npu_ops_tools import report
    from npu_ops_tools.verify import report as verified

    try:
        if [path.suffix for path in results] == [".json"]:
            print(f"written: {verified.write(verified.read(results[0]), output)[1]}")
            return
        written = report.write(output, **report.read(results))
    except (ImportError, OSError, ValueError) as error:
        fail(error)
    print(f"written: {written}")
