"""`npu-ops model`."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterable
from typing import Annotated

import typer
from npu_ops_emulator import vendor

from npu_ops_tools.options import AsJson, Dtype, fail, print_json

LEAST_US = 1.3  # shortest measured launch: CANN's fastest operator in measured.csv
NOTE = "npu-model: predicted from the compiled kernel, not measured. Accuracy: docs/npu-model.md"


def model_command(
    target: Annotated[
        str | None, typer.Argument(metavar="OP", help="An op, or FILE.py::KERNEL.")
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(help="Name of a case; may be repeated; default: a representative one."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Predict every case of the op.")] = False,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Number of tokens; default: the case's own.")
    ] = None,
    soc: Annotated[str, typer.Option(help="An SoC of the family Ascend910B or Ascend910_93.")] = (
        vendor.SOCS[0]
    ),
    dtype: Annotated[Dtype, typer.Option(help="Dtype of the case's inputs.")] = Dtype.BFLOAT16,
    signature: Annotated[
        str,
        typer.Option(
            help='Arguments of FILE.py::KERNEL, with elements or values: "x=*bf16:8192,n=i32:8192".'
        ),
    ] = "",
    constexpr: Annotated[str, typer.Option(help='Constants of FILE.py::KERNEL: "N=512".')] = "",
    grid: Annotated[
        str, typer.Option(help="Grid of FILE.py::KERNEL: programs along each axis, 16 or 16,8,2.")
    ] = "1",
    trace: Annotated[
        pathlib.Path | None,
        typer.Option(help="Write a Chrome trace of one program of each kernel."),
    ] = None,
    calibrate: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="REPORT.json",
            help="Instead: fit the constants to the times that verify --full measured.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict a kernel's time on an NPU from the vendor compiler's output.

    The exit status is 1 if the model cannot predict the kernel: it then lists what is unknown.

    \b
    npu-ops model l2norm --case qwen3-next-tp1-t8192
    npu-ops model mine.py::add --signature "x=*bf16:8192,n=i32:8192" --constexpr "N=512" --grid 16
    npu-ops model mine.py::tuned --signature "x=*bf16:8192,n=i32:8192" --grid 16,1,1
    npu-ops model --calibrate full/verify.json
    """
    import torch

    from npu_ops_tools.model import costs, kernel_of_file, of_call, predict_all
    from npu_ops_tools.model import trace as traces
    from npu_ops_tools.model.launched import beside, call_of_case
    from npu_ops_tools.model.machine import Unknown

    if calibrate:
        _calibrate(calibrate, as_json)
        return
    if target is None:
        fail("target: got none, needs an op, FILE.py::KERNEL or --calibrate REPORT.json")
    if trace and not trace.parent.is_dir():
        fail(f"--trace: got '{trace}', needs a folder that exists")
    try:
        costs.of(soc)  # raises for an SoC without costs, before anything is compiled
        if "::" in target:
            launches = kernel_of_file(target, signature, constexpr, _axes(grid))
            _check_grid(launches, grid, soc)
            found = _of_configurations(launches, soc, trace is not None)
            if not as_json:
                _print(found)
        else:
            found = []
            for name in _cases(target, case, every):
                call = call_of_case(target, name, getattr(torch, dtype.value), tokens)
                print(f"npu-ops: {name}", file=sys.stderr)
                of_case = list(predict_all(of_call(name, soc, *call), soc, spans=trace is not None))
                found += of_case
                if not as_json:
                    _print(of_case)
                    _print_beside(beside(soc, *call))
    except Unknown as error:
        print(f"npu-ops: {error}")
        raise typer.Exit(1) from error
    except (FileNotFoundError, RuntimeError, ValueError) as error:
        fail(error)
    if trace:
        traces.write(trace, found)
    if as_json:
        print_json([prediction.fields() for prediction in found])
    else:
        print(NOTE)


def _axes(text: str) -> tuple[int, ...]:
    axes = text.split(",")
    numbers = [int(axis) for axis in axes if axis.isascii() and axis.isdigit()]
    if not 1 <= len(axes) <= 3 or len(numbers) != len(axes) or min(numbers) < 1:
        raise ValueError(f"--grid: got {text!r}, needs one to three numbers of programs, as 16,8,2")
    return tuple(numbers)


def _check_grid(launches: list, grid: str, soc: str) -> None:
    """Check that --grid has every axis that the kernel reads; a missing axis would count as 1."""
    from npu_ops_tools.compile.files import axes_read

    read = axes_read(launches[0], soc.removesuffix("-1"))
    if read > len(launches[0].grid):
        raise ValueError(
            f"--grid: got {grid!r}, needs {read} numbers: {launches[0].name} uses program_id or "
            f"num_programs of axis {read - 1}"
        )


def _of_configurations(launches: list, soc: str, spans: bool) -> list:
    """Predict each launch. As Triton's autotuner does, leave out those that do not compile."""
    from npu_ops_tools.model import predict

    found, errors = [], {}
    for launch in launches:
        try:
            found.append(predict(launch, soc, spans=spans))
        except vendor.CompileError as error:
            errors[launch.case] = error
    for case, error in errors.items():
        if not found:
            raise error
        print(f"npu-ops: {case}: does not compile: {error}", file=sys.stderr)
    return found


def _calibrate(path: pathlib.Path, as_json: bool) -> None:
    from npu_ops_tools.model.calibration import fit
    from npu_ops_tools.verify import report

    try:
        found = fit.fit(*fit.measured(report.read(path)))
    except (OSError, RuntimeError, ValueError) as error:
        fail(error)
    if as_json:
        print_json(found.fields())
    else:
        print("\n".join(fit.lines(found)))


def _cases(op: str, names: list[str] | None, every: bool) -> list[str]:
    from npu_ops.core import cases
    from npu_ops_tools.where import ops

    if op not in ops():
        raise ValueError(f"target: got {op!r}, needs one of {', '.join(ops())} or FILE.py::KERNEL")
    known = [case.name for case in cases.of(op).CASES]
    if every:
        return known
    if not names:
        names = cases.of(op).REPRESENTATIVE[:1]
        print(f"npu-ops: one of {len(known)} cases; --all predicts every one", file=sys.stderr)
    return list(names)


def _print(found: Iterable) -> None:
    from rich.console import Console
    from rich.table import Table

    found = list(found)
    table = Table("case", "kernel", "us", "likely", "range", "bottleneck", "pipes", "MB",
                  "of limit", "cores")  # fmt: skip
    for each in found:
        pipes = sorted(each.shares.items(), key=lambda item: -item[1])[:4]
        kernel = f"{each.kernel}, backward" if each.backward else each.kernel
        table.add_row(
            each.case, kernel, f"{each.us:.1f}", f"{each.likely_us:.1f}",
            f"{each.low_us:.1f} to {each.high_us:.1f}", each.bottleneck,
            ", ".join(f"{name} {share:.0%}" for name, share in pipes),
            f"{(each.loaded + each.stored) / 1e6:.2f}", f"{each.of_limit:.0%}",
            f"{each.programs} programs, {each.balance:.0%} even",
        )  # fmt: skip
    Console(width=160).print(table)
    for kernel in sorted({each.kernel for each in found if each.assumed}):
        print(f"{kernel}: predicted for valid lengths, which the kernel checks with vectors")


def _print_beside(found: dict[str, int]) -> None:
    """Print PyTorch's own launches in the same call."""
    count = sum(found.values())
    if count:
        named = ", ".join(f"{operator} {times}" for operator, times in found.items())
        print(
            f"in addition {count} launches of PyTorch, at least {count * LEAST_US:.1f} us: {named}"
        )
