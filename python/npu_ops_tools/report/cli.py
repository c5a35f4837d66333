"""`npu-ops report`."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from npu_ops_tools.options import fail


def report_command(
    results: Annotated[
        list[pathlib.Path], typer.Argument(help="What `npu-ops bench` wrote: files or folders.")
    ],
    output: Annotated[
        pathlib.Path, typer.Option("--output", "-o", help="Folder of the report.")
    ] = pathlib.Path("report"),
) -> None:
    """Make a page of benchmark results, index.html, and report.md beside it."""
    from npu_ops_tools import report

    try:
        written = report.write(output, **report.read(results))
    except (FileNotFoundError, ImportError, ValueError) as error:
        fail(error)
    print(f"written: {written}")
