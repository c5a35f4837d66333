"""`npu-ops compile`."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterable, Iterator

from npu_ops_emulator import vendor

from npu_ops.core.socs import ub_bytes
from npu_ops_tools.compile.launches import FLOATS, Launch, cases_of, from_file, launches
from npu_ops_tools.compile.report import CompileReport, compile_launch
from npu_ops_tools.where import ops

EXAMPLES = """
npu-ops compile                                  every kernel of every op, for the models' shapes
npu-ops compile rope --soc Ascend910_9391        one op, another SoC
npu-ops compile mine.py::add_kernel --signature "x=*bf16,y=*bf16,n=i32" --constexpr BLOCK=4096

The exit status is 1 if a kernel does not compile, has a scalar loop, or lost multi-buffering.
"""
TOTALS = ("vector", "cube", "loads", "stores", "loaded", "stored")


@dataclasses.dataclass(frozen=True)
class Row:
    """One kernel for one SoC: a report, or why there is none."""

    op: str
    launch: Launch
    soc: str
    report: CompileReport | None
    faults: list[str]

    def fields(self) -> dict:
        """For JSON and CSV."""
        known = {"op": self.op, "case": self.launch.case, "kernel": self.launch.name}
        known |= {"soc": self.soc, "faults": self.faults, "constants": dict(self.launch.constants)}
        if self.report is None:
            return known
        totals = {name: self.report.total(name) for name in TOTALS}
        return known | dataclasses.asdict(self.report) | totals


def main(argv: list[str] | None = None) -> int:
    """Compile and print a table; 1 if a kernel does not compile or has a fault."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        rows = list(_rows(options))
    except ValueError as error:
        parser.error(str(error))
    except (FileNotFoundError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    if options.json:
        options.json.write_text(json.dumps([row.fields() for row in rows], indent=1, default=str))
    if options.csv:
        _write_csv(rows, options.csv)
    _print(rows, options.bodies)
    faulty = [row for row in rows if row.faults]
    for row in faulty:
        what = "\n  ".join(row.faults)
        print(f"FAULT {row.launch.name} {row.launch.case} {row.soc}:\n  {what}")
    print(f"{len(rows)} kernels, {len(faulty)} with faults ({vendor.versions()})")
    return 1 if faulty or not rows else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "npu-ops compile",
        description="Compile Triton kernels with the vendor's compiler, without an NPU.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = ", ".join(ops())
    add = parser.add_argument
    add("targets", nargs="*", metavar="OP", help=f"{known}, or FILE.py::KERNEL; default: all ops")
    add("--soc", action="append", help=f"default {vendor.SOCS[0]}; may be repeated")
    add("--case", action="append", help="a case's name; may be repeated")
    add("--dtype", action="append", choices=FLOATS, help="default all; may be repeated")
    of_kernel = {"action": "append", "default": []}
    add("--signature", **of_kernel, help='of FILE.py::KERNEL: "x=*bf16,n=i32"; may be repeated')
    add("--constexpr", **of_kernel, help='of FILE.py::KERNEL: "BLOCK=1024"; may be repeated')
    add("--bodies", action="store_true", help="also show each loop's body")
    add("--json", type=_file, metavar="FILE", help="write the reports to FILE")
    add("--csv", type=_file, metavar="FILE", help="write a row for each kernel to FILE")
    return parser


def _file(text: str) -> pathlib.Path:
    """A file that can be written: compiling takes minutes, and then it is too late to say no."""
    path = pathlib.Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"got {text!r}, needs a folder that exists")
    return path


def _rows(options) -> Iterator[Row]:
    targets, socs = options.targets or ops(), options.soc or vendor.SOCS[:1]
    for soc in socs:
        ub_bytes(soc)  # refuses what is none
    _check_cases(targets, options.case or ())
    for target in targets:
        for soc in socs:
            for launch in _launches(target, soc, options):
                yield _row(target, launch, soc)


def _launches(target: str, soc: str, options) -> Iterable[Launch]:
    import torch

    if "::" in target:
        return [from_file(target, ",".join(options.signature), ",".join(options.constexpr))]
    dtypes = [getattr(torch, name) for name in options.dtype or FLOATS]
    return launches(target, options.case, dtypes, soc)


def _check_cases(targets: list[str], names: list[str]) -> None:
    """
    Raises:
        ValueError: no such op, or a case that none of them has.
    """
    known = set()
    for target in targets:
        if target in ops():
            known |= {case.name for case in cases_of(target).CASES}
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
    """Without the loops' bodies, which have no place in a row."""
    fields = [row.fields() for row in rows]
    names = [name for name in max(fields, key=len, default={}) if name != "bodies"]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore")
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
        shown = (report.kernel, report.soc, report.core, report.ub_bytes, report.l1_bytes,
                 report.l0c_bytes, len(report.scalar_loops), report.multi_buffer,
                 *(report.total(name) for name in TOTALS), report.seconds)  # fmt: skip
        table.add_row(*map(str, shown))
        for body in report.bodies if bodies else ():
            counts = (getattr(body, name) for name in TOTALS)
            table.add_row(f"  loop {body.depth} {body.source}", *[""] * 7, *map(str, counts))
    Console(width=180).print(table)
