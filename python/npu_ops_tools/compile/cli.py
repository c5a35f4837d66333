"""`npu-ops compile`."""

from __future__ import annotations

import csv as csv_files
import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Annotated

import torch
import typer
from npu_ops_emulator import vendor

from npu_ops.core import cases as op_cases
from npu_ops.core.room import rooms
from npu_ops.core.socs import ub_bytes
from npu_ops_tools.compile.files import from_file
from npu_ops_tools.compile.launches import Launch, launches
from npu_ops_tools.compile.report import CompileReport, compile_launch
from npu_ops_tools.options import AsJson, Dtype, fail, print_json
from npu_ops_tools.where import ops

TOTALS = ("vector", "cube", "loads", "stores", "loaded", "stored")


@dataclasses.dataclass(frozen=True)
class Signature:
    """The parameters of FILE.py::KERNEL, in the form of `from_file`."""

    arguments: str
    constants: str


@dataclasses.dataclass(frozen=True)
class Row:
    """One kernel for one SoC. Without a report, `faults` says why it does not compile."""

    op: str
    launch: Launch
    soc: str
    report: CompileReport | None
    faults: list[str]

    def fields(self) -> dict:
        """Return the fields for JSON and CSV."""
        known = {"op": self.op, "case": self.launch.case, "kernel": self.launch.name}
        known |= {"soc": self.soc, "faults": self.faults, "constants": dict(self.launch.constants)}
        if self.report is None:
            return known
        totals = {name: self.report.total(name) for name in TOTALS}
        return known | dataclasses.asdict(self.report) | totals


def compile_command(
    targets: Annotated[
        list[str] | None,
        typer.Argument(metavar="OP", help="Ops, or FILE.py::KERNEL; default: all ops."),
    ] = None,
    soc: Annotated[
        list[str] | None, typer.Option(help=f"SoC; may be repeated; default: {vendor.SOCS[0]}.")
    ] = None,
    case: Annotated[
        list[str] | None, typer.Option(help="Name of a case; may be repeated; default: all.")
    ] = None,
    dtype: Annotated[
        list[Dtype] | None, typer.Option(help="Dtype of the inputs; may be repeated; default: all.")
    ] = None,
    signature: Annotated[
        list[str] | None,
        typer.Option(
            help='Argument types of FILE.py::KERNEL: "x=*bf16,n=i32"; with values if heuristics '
            'ask for them: "x=*bf16:8192,n=i32:8192"; may be repeated.'
        ),
    ] = None,
    constexpr: Annotated[
        list[str] | None,
        typer.Option(
            help='Constants of FILE.py::KERNEL: "N=512"; may be repeated. Omit those that '
            "heuristics or the autotuner set."
        ),
    ] = None,
    suggest_tile: Annotated[
        bool, typer.Option("--suggest-tile", help="Print the largest tile that fits every SoC.")
    ] = False,
    bodies: Annotated[bool, typer.Option("--bodies", help="Also show each loop's body.")] = False,
    as_json: AsJson = False,
    csv: Annotated[
        pathlib.Path | None, typer.Option(help="Write a row for each kernel to this file.")
    ] = None,
) -> None:
    """Compile Triton kernels with the vendor's compiler, without an NPU, and check the result.

    The exit status is 1 if a kernel does not compile, has a scalar loop, stores beyond its mask, or
    lost an optimization such as multi-buffering.

    \b
    npu-ops compile l2norm --dtype bfloat16 --soc Ascend910_9391
    npu-ops compile mine.py::add --signature "x=*bf16,n=i32" --constexpr "N=512"
    npu-ops compile mine.py::tuned --signature "x=*bf16:8192,n=i32:8192"
    """
    # Check this first: compiling takes minutes.
    if csv and not csv.parent.is_dir():
        fail(f"--csv: got '{csv}', needs a folder that exists")
    if suggest_tile:
        _suggest_tiles(targets or list(ops()), soc or vendor.SOCS, case, dtype or Dtype, as_json)
        return
    given = Signature(",".join(signature or ()), ",".join(constexpr or ()))
    dtypes = [name.value for name in dtype or Dtype]
    try:
        rows = list(_rows(targets or list(ops()), soc or vendor.SOCS[:1], case, dtypes, given))
    except (FileNotFoundError, RuntimeError, ValueError) as error:
        fail(error)
    if csv:
        _write_csv(rows, csv)
    if as_json:
        print_json([row.fields() for row in rows])
    else:
        _print(rows, bodies)
    raise typer.Exit(1 if not rows or any(row.faults for row in rows) else 0)


def _suggest_tiles(targets, socs, case, dtypes, as_json: bool) -> None:
    from npu_ops_tools.compile import tiles

    dtypes, found = [getattr(torch, name.value) for name in dtypes], []
    try:
        _check_cases(targets, case or ())
        for target in targets:
            if target not in ops():
                fail(f"--suggest-tile: got {target!r}, needs ops")
            found += tiles.suggest(target, case, dtypes, socs)
    except (FileNotFoundError, RuntimeError, ValueError) as error:
        fail(error)
    if as_json:
        print_json([dataclasses.asdict(each) for each in found])
        return
    for each in found:
        print(
            f"{each.kernel}: tile of {each.launched} elements; {each.tile} fit in all "
            f"{each.launches} launches, tile_elements({each.bytes_per_element})"
        )


def _rows(
    targets: list[str],
    socs: Sequence[str],
    cases: list[str] | None,
    dtypes: list[str],
    given: Signature,
) -> Iterator[Row]:
    for soc in socs:
        ub_bytes(soc)  # raises for an unknown SoC
    _check_cases(targets, cases or ())
    for target in targets:
        for soc in socs:
            if "::" in target:
                found = from_file(target, given.arguments, given.constants)
                yield from (_row(target, launch, soc) for launch in found)
            else:
                yield from _rows_of_op(target, soc, cases, dtypes)


def _rows_of_op(op: str, soc: str, cases: list[str] | None, dtypes: list[str]) -> list[Row]:
    """Compile an op's kernels. On "ub overflow", compile all again with halved tiles."""

    def compiled() -> list[Row]:
        found = launches(op, cases, [getattr(torch, name) for name in dtypes], soc)
        return [_row(op, launch, soc) for launch in found]

    rows, room = compiled(), rooms.get(op)
    try:
        while room and any(room.halve(fault) for row in rows for fault in row.faults):
            rows = compiled()
    finally:
        if room:
            room.halvings = 0
    return rows


def _check_cases(targets: list[str], names: list[str]) -> None:
    """Check that all ops and cases exist.

    Raises:
        ValueError: there is no such op, or none of them has a case of this name.
    """
    known = set()
    for target in targets:
        if target in ops():
            known |= {case.name for case in op_cases.of(target).CASES}
        elif "::" not in target:
            needs = f"{', '.join(ops())} or FILE.py::KERNEL"
            raise ValueError(f"target: got {target!r}, needs one of {needs}")
    for name in names:
        if name not in known:
            raise ValueError(
                f"case: got {name!r}, needs one of {', '.join(sorted(known)) or 'none'}"
            )


def _row(op: str, launch: Launch, soc: str) -> Row:
    try:
        report = compile_launch(launch, soc)
    except vendor.CompileError as error:
        return Row(op, launch, soc, None, [str(error)])
    return Row(op, launch, soc, report, report.faults())


def _write_csv(rows: list[Row], path: pathlib.Path) -> None:
    """Write the rows as CSV, without the loop bodies."""
    fields = [row.fields() for row in rows]
    names = [name for name in max(fields, key=len, default={}) if name != "bodies"]
    with path.open("w", newline="") as file:
        writer = csv_files.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(fields)


def _print(rows: list[Row], bodies: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    names = ("kernel", "soc", "core", "ub_bytes", "l1_bytes", "l0c_bytes", "scalar", "multi-buffer",
             *TOTALS, "seconds")  # fmt: skip
    table = Table(*names)
    for row in rows:
        if row.report is None:
            table.add_row(row.launch.name, row.soc, "[red]does not compile")
            continue
        report = row.report
        name = f"{report.kernel} {row.launch.case}" if "::" in row.op else report.kernel
        shown = (name.strip(), report.soc, report.core, report.ub_bytes, report.l1_bytes,
                 report.l0c_bytes, len(report.scalar_loops), report.multi_buffer,
                 *(report.total(name) for name in TOTALS), report.seconds)  # fmt: skip
        table.add_row(*map(str, shown))
        for body in report.bodies if bodies else ():
            counts = (getattr(body, name) for name in TOTALS)
            table.add_row(f"  loop {body.depth} {body.source}", *[""] * 7, *map(str, counts))
    Console(width=180).print(table)
    faulty = [row for row in rows if row.faults]
    for row in faulty:
        what = "\n  ".join(row.faults)
        print(f"FAULT {row.launch.name} {row.launch.case} {row.soc}:\n  {what}")
    print(f"{len(rows)} kernels, {len(faulty)} with faults ({vendor.versions()})")
