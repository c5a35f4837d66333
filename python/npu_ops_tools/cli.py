"""The command `npu-ops`."""

from __future__ import annotations

import enum
import json
import pathlib
import sys
from typing import Annotated

import typer
from rich.console import Console

import npu_ops

app = typer.Typer(
    help="Operators for Qwen3-VL, Qwen3-Next and Qwen3.5 class models on Ascend NPUs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()
# The rest of the line goes to a parser of its own.
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
Ops = Annotated[list[str] | None, typer.Argument(help="Some ops; default: all.")]


class Device(str, enum.Enum):
    """Where the demo trains."""

    CPU = "cpu"
    NPU = "npu"
    EMULATED = "npu-emulated"


class Dtype(str, enum.Enum):
    """What parity is compared in."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


def version(wanted: bool) -> None:
    if wanted:
        console.print(npu_ops.__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=version, is_eager=True)] = False,
) -> None:
    """Nothing of its own."""


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json")] = False,
    modules: Annotated[
        list[str] | None,
        typer.Option("--import", help="Import this too, for what it does to our patches."),
    ] = None,
) -> None:
    """What this machine has, what each op takes and why, what is patched, what is amiss.

    The exit status is 1 when something that was asked for is not in force.
    """
    from npu_ops_tools import doctor

    found = doctor.collect(modules or ())
    print(json.dumps(found, indent=1) if as_json else doctor.text(found))
    raise typer.Exit(1 if found["not in force"] else 0)


@app.command("list")
def list_ops() -> None:
    """The ops, their public functions and their implementations."""
    from npu_ops_tools import where

    for op, functions in where.ops().items():
        console.print(f"[bold]{op}[/] ({', '.join(where.implementations(op))})")
        for function in functions:
            summary = getattr(npu_ops, function).__doc__.partition("\n")[0]
            console.print(f"  {function}: {summary}", highlight=False)


@app.command()
def where(op: Annotated[str, typer.Argument(help="An op or one of its functions.")]) -> None:
    """Where an op is: definition, kernels, tests, benchmark, adapters."""
    from npu_ops_tools import where

    try:
        found = where.where(op)
    except ValueError as error:
        fail(error)
    for what, paths in found.items():
        for path in paths:
            print(f"{what:16}{path.relative_to(where.ROOT)}")


@app.command()
def explain(
    op: Annotated[str, typer.Argument(help="attention")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="Fields of AttentionSpec, as heads=16 head_dim=72 keys=packed."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Which operator of an NPU computes a call, how it is told, and why nothing better does."""
    from npu_ops_tools import explain

    try:
        plan = explain.explain(op, settings or [])
    except ValueError as error:
        fail(error)
    print(json.dumps(plan.as_dict(), indent=1) if as_json else plan)


@app.command()
def demo(
    output: Annotated[pathlib.Path, typer.Option(help="Folder of the report.")] = pathlib.Path(
        "report"
    ),
    megatron: Annotated[
        pathlib.Path | None,
        typer.Option(help="Folder that megatron-core is in, if it is not installed."),
    ] = None,
    device: Annotated[
        Device | None, typer.Option(help="Default: an NPU if there is one, else the CPU.")
    ] = None,
    steps: Annotated[int, typer.Option(min=10, help="Training steps.")] = 30,
    seeds: Annotated[int, typer.Option(min=2, help="Runs with dropout, each with its seed.")] = 4,
) -> None:
    """Train real megatron-core models without and with npu-ops, and compare."""
    from npu_ops_tools import demo

    try:
        passed = demo.run(output, megatron, device and device.value, steps, seeds, console)
    except (FileNotFoundError, ImportError, RuntimeError) as error:
        fail(error)
    raise typer.Exit(0 if passed else 1)


@app.command()
def parity(
    ops: Ops = None,
    model: Annotated[str, typer.Option(help="Its shapes: qwen3-vl-8b, qwen3.5-9b, ...")] = (
        "qwen3-vl-8b"
    ),
    dtype: Dtype = Dtype.BFLOAT16,
    device: str = "cpu",
    tokens: Annotated[int, typer.Option(min=2)] = 64,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks: heads of one.")] = 1,
) -> None:
    """Compare every op with its reference at a model's shapes, forward and gradients."""
    import torch

    from npu_ops_tools import parity

    rows = []
    print(f"{model}, {dtype.value}, {device}: errors as parts of what is allowed, 1 at most")
    try:
        for row in parity.run(model, getattr(torch, dtype.value), device, tokens, tp, ops):
            print(parity.line(row) if rows else f"{parity.HEAD}\n{parity.line(row)}", flush=True)
            rows.append(row)
    except (RuntimeError, ValueError) as error:
        fail(error)
    raise typer.Exit(0 if all(row.passed for row in rows) else 1)


@app.command()
def replay(
    file: Annotated[pathlib.Path, typer.Argument(help="What NPU_OPS_LOG=shadow:N wrote.")],
    device: Annotated[
        str | None, typer.Option(help="Default: the one on which it was wrong.")
    ] = None,
) -> None:
    """Compute again, and compare with the reference, what shadow mode found to be wrong."""
    from npu_ops.core import shadow
    from npu_ops_tools import replay

    try:
        what, errors = replay.replay(file, device)
    except (FileNotFoundError, RuntimeError, ValueError) as error:
        fail(error)
    passed = all(ratio <= most for ratio, most in errors.values())
    print(f"{'passed' if passed else 'WRONG'}: {what}: {shadow.shown(errors)}")
    raise typer.Exit(0 if passed else 1)


@app.command()
def bench(
    ops: Ops = None,
    output: Annotated[
        pathlib.Path | None,
        typer.Option(help="Folder for the CSV, named after the device."),
    ] = None,
    quick: Annotated[bool, typer.Option(help="Few small cases.")] = False,
    device: str = "cpu",
) -> None:
    """Time the ops against what they replace, after checking that they are right."""
    from npu_ops_tools import bench

    try:
        rows = bench.run(ops, quick, device, report=show_row)
    except (FileNotFoundError, ValueError, AssertionError) as error:
        fail(error)
    if output:
        path = bench.write(rows, output)
        console.print(f"{len(rows)} rows in {path}")


def show_row(row: dict) -> None:
    print(
        f"{row['op']:16} {row['case']:23} {row['mode']:23} {row['dtype']:9} {row['impl']:9} "
        f"{row['ms_p50']:>10} ms {row['gbps']:>7} GB/s {row['speedup']:>8} x {row['ref_impl']}",
        flush=True,
    )


@app.command()
def report(
    csv: Annotated[list[pathlib.Path], typer.Argument(help="What `npu-ops bench` wrote.")],
    output: Annotated[pathlib.Path, typer.Option(help="Folder of the report.")] = pathlib.Path(
        "report"
    ),
) -> None:
    """Make a page of benchmark results."""
    from npu_ops_tools import report

    try:
        path = report.write(output, timings=[report.read_timings(path) for path in csv])
    except (FileNotFoundError, ImportError, ValueError) as error:
        fail(error)
    console.print(f"written: {path}")


@app.command(context_settings=PASSED_ON)
def compile(context: typer.Context) -> None:
    """Compile the Triton kernels with the vendor's compiler and check what it made of them."""
    from npu_ops_tools import compile

    raise typer.Exit(compile.main(context.args))


@app.command(context_settings=PASSED_ON)
def emulate(context: typer.Context) -> None:
    """Run a command as if this machine had NPUs: the real torch_npu, in host memory."""
    from npu_ops_emulator.__main__ import main

    raise typer.Exit(main(context.args))


def fail(error: Exception) -> None:
    """Say what is wrong in one line, and end."""
    print(f"npu-ops: {error}", file=sys.stderr)
    raise typer.Exit(2)


def main() -> None:
    """The entry point."""
    app()


if __name__ == "__main__":
    main()
