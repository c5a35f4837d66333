"""`npu-ops bench`."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Annotated

import typer

from npu_ops_tools.options import AsJson, Device, Ops, check_device, fail, print_json


def bench_command(
    ops: Ops = None,
    output: Annotated[
        pathlib.Path | None, typer.Option(help="Folder for the rows: <device>/<op>.csv in it.")
    ] = None,
    commit: Annotated[
        bool,
        typer.Option("--commit", help="Write to benchmarks/results; needs a clean git tree."),
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Only two sizes of one model.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Only benchmarks with this in their name; may be repeated."
        ),
    ] = None,
    longest: Annotated[
        float,
        typer.Option(
            min=0, help="Time limit in seconds for a benchmark that does not become stable."
        ),
    ] = 60.0,
    compare: Annotated[
        tuple[pathlib.Path, pathlib.Path] | None,
        typer.Option(metavar="OLD NEW", help="Time nothing; compare two stored results."),
    ] = None,
    threshold: Annotated[
        float, typer.Option(min=0, help="With --compare: the slowdown that fails, 0.05 for 5 %.")
    ] = 0.05,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Check the ops against their references, then time them against their peers.

    With --compare the exit status is 1 if a benchmark became significantly slower.
    """
    from npu_ops_tools import where
    from npu_ops_tools.bench import rows
    from npu_ops_tools.bench.run import run

    if compare:
        raise typer.Exit(_compare(*compare, threshold, as_json))
    if commit:
        if rows.commit()[1]:
            fail("--commit: got uncommitted changes, needs a clean git tree")
        output = where.clone() / "benchmarks" / "results"
    found = []
    try:
        check_device(device)
        for row in run(ops, quick, device, only, longest):
            found.append(row)
            if not as_json:
                print(line(row), flush=True)
            if output:
                rows.upsert([row], output)
    except (FileNotFoundError, ValueError, AssertionError) as error:
        fail(error)
    if as_json:
        print_json([dataclasses.asdict(row) for row in found])
    elif output:
        print(f"{len(found)} rows in {output}")


def line(row) -> str:
    """Format a row as text."""
    if row.state == "absent":
        return f"{row.op}: {row.provider} is absent: {row.note}"
    spread = f"{row.ms_p20:.4g} to {row.ms_p80:.4g}"
    mark = "" if row.state == "stable" else "  unstable"
    return f"{row.name:95} {row.provider:20} {row.ms_p50:10.4g} ms ({spread}){mark}"


def _compare(old: pathlib.Path, new: pathlib.Path, threshold: float, as_json: bool) -> int:
    """Print the ratios of two results; return 1 if one exceeds the threshold, else 0."""
    from npu_ops_tools.bench import rows
    from npu_ops_tools.bench.compare import compare, slower

    try:
        changes = compare(rows.read(old), rows.read(new))
    except (FileNotFoundError, ValueError) as error:
        fail(error)
    worse = slower(changes, threshold)
    if as_json:
        print_json([dataclasses.asdict(change) for change in changes])
    else:
        print("time of new / time of old (95 % interval)")
        for change in changes:
            print(change)
        print(f"{len(worse)} of {len(changes)} significantly slower, by more than {threshold:.0%}")
    return 1 if worse else 0
