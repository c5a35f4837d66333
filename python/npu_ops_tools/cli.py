"""The command `npu-ops`."""

from __future__ import annotations

import dataclasses
import enum
import functools
import pathlib
from collections.abc import Callable, Iterable
from typing import Annotated, NoReturn

import typer
from npu_ops_emulator import __main__ as emulator
from rich.console import Console
from rich.table import Table

import npu_ops
from npu_ops_tools.bench.cli import bench_command
from npu_ops_tools.compile.cli import compile_command
from npu_ops_tools.model.cli import model_command
from npu_ops_tools.options import AsJson, Device, Dtype, Ops, check_device, fail, print_json
from npu_ops_tools.report.cli import report_command
from npu_ops_tools.tune.cli import tune_command
from npu_ops_tools.verify.cli import verify_command

app = typer.Typer(
    help="Operators for Qwen3-VL, Qwen3-Next and Qwen3.5 class models on Ascend NPUs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()


class DemoDevice(str, enum.Enum):
    """Where the demo trains."""

    CPU = "cpu"
    NPU = "npu"
    EMULATED = "npu-emulated"


def version(wanted: bool) -> None:
    if wanted:
        console.print(npu_ops.__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Options of the command itself."""


@app.command()
def doctor(
    as_json: AsJson = False,
    modules: Annotated[
        list[str] | None,
        typer.Option("--import", help="Also import this module, to see its effect on the patches."),
    ] = None,
    trainer: Annotated[
        str | None,
        typer.Option(help="Report the problems that would stop slime, relax or verl here."),
    ] = None,
) -> None:
    """Report versions, each op's implementation and why, patches of frameworks, and problems.

    The exit status is 1 if a requested feature is not active, or if a trainer could not run.
    """
    from npu_ops.core import preferences
    from npu_ops_tools import doctor, trainers

    if trainer:
        if trainer not in trainers.TRAINERS:
            fail(f"--trainer: got {trainer!r}, needs {', '.join(trainers.TRAINERS)}")
        found = trainers.collect(trainer)
        print_json(found) if as_json else print(trainers.text(found))
        raise typer.Exit(1 if found["stops"] else 0)
    try:
        for device in doctor.devices():
            preferences.of(device)  # without a valid table, no op of this device can be explained
    except ValueError as error:
        fail(error)
    found = doctor.collect(modules or ())
    print_json(found) if as_json else print(doctor.text(found))
    raise typer.Exit(1 if found["not in force"] else 0)


@app.command("list")
def list_ops(as_json: AsJson = False) -> None:
    """List the ops, their public functions and their implementations."""
    from npu_ops_tools import where

    found = where.summaries()
    if as_json:
        print_json(found)
        return
    for op, about in found.items():
        console.print(f"[bold]{op}[/] ({', '.join(about['implementations'])})")
        for function, summary in about["functions"].items():
            console.print(f"  {function}: {summary}", highlight=False)


@app.command()
def where(
    op: Annotated[str, typer.Argument(help="Name of an op or of a public function.")],
    as_json: AsJson = False,
) -> None:
    """Show the files of an op: definition, kernels, tests, benchmark, adapters."""
    from npu_ops_tools import where

    try:
        found = where.where(op)
    except ValueError as error:
        fail(error)
    shown = {what: [str(path.relative_to(where.ROOT)) for path in found[what]] for what in found}
    if as_json:
        print_json(shown)
        return
    for what, paths in shown.items():
        for path in paths:
            print(f"{what:16}{path}")


@app.command("new-op")
def new_op(
    name: Annotated[str, typer.Argument(help="Name of the op, in lower case.")],
) -> None:
    """Write the files of a new op to this clone. They build, and pass their tests."""
    from npu_ops_tools import new_op, where

    try:
        paths = new_op.write(name, where.clone())
    except (FileNotFoundError, ValueError) as error:
        fail(error)
    print(*paths, "", new_op.NEXT.format(op=name), sep="\n")


@app.command()
def explain(
    op: Annotated[str, typer.Argument(help="The op to explain: attention.")],
    settings: Annotated[
        list[str] | None, typer.Argument(help="Fields of AttentionSpec, as NAME=VALUE.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show which NPU operator computes a call, with which arguments, and why no better one does.

    \b
    npu-ops explain attention heads=16 head_dim=72
    npu-ops explain attention layout=TND keys=packed heads=16 head_dim=72
    """
    from npu_ops_tools import explain

    try:
        plan = explain.explain(op, settings or [])
    except ValueError as error:
        fail(error)
    print_json(plan.as_dict()) if as_json else print(plan)


@app.command()
def demo(
    output: Annotated[pathlib.Path, typer.Option(help="Folder for the report.")] = pathlib.Path(
        "report"
    ),
    megatron: Annotated[
        pathlib.Path | None,
        typer.Option(help="Folder that contains megatron-core, if it is not installed."),
    ] = None,
    device: Annotated[
        DemoDevice | None, typer.Option(help="Default: an NPU if there is one, else the CPU.")
    ] = None,
    steps: Annotated[int, typer.Option(min=10, help="Training steps.")] = 30,
    seeds: Annotated[
        int, typer.Option(min=2, help="Number of runs with dropout, each with its own seed.")
    ] = 4,
) -> None:
    """Train real megatron-core models without and with npu-ops, and compare."""
    from npu_ops_tools import demo

    try:
        if device and device is not DemoDevice.EMULATED:
            check_device(device.value)
        passed = demo.run(output, megatron, device and device.value, steps, seeds, console)
    except (FileNotFoundError, ImportError, RuntimeError, ValueError) as error:
        fail(error)
    raise typer.Exit(0 if passed else 1)


@app.command()
def launches(
    model: Annotated[
        str, typer.Argument(help="Model folder with the config.json of transformers.")
    ],
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of the prompt.")] = 128,
    as_json: AsJson = False,
) -> None:
    """Count the kernels that a model launches, with and without npu-ops, on the emulated NPU.

    The model has random weights, and ends as soon as it has a layer of each kind. A matrix product
    counts as one launch, a view as none.

    npu-ops launches path/to/Qwen3.5-9B
    """
    from npu_ops_tools import launches

    try:
        found = launches.both(model, tokens)
    except (RuntimeError, ValueError) as error:
        fail(error)
    if as_json:
        print_json({name: [dataclasses.asdict(s) for s in steps] for name, steps in found.items()})
        return
    table = Table("step", "layer", *found)
    for step, layer, counts in launches.rows(found):
        table.add_row(step, layer, *map(str, counts), end_section=layer == "all")
    console.print(table)


@app.command()
def parity(
    ops: Ops = None,
    model: Annotated[str, typer.Option(help="Use its shapes: qwen3-vl-8b, qwen3.5-9b, ...")] = (
        "qwen3-vl-8b"
    ),
    dtype: Annotated[Dtype, typer.Option(help="Dtype of the inputs.")] = Dtype.BFLOAT16,
    device: Device = "cpu",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens per sequence.")] = 64,
    tp: Annotated[
        int, typer.Option(min=1, help="Tensor-parallel ranks; the heads of one rank are used.")
    ] = 1,
    rollout: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Instead: sample from this model folder with SGLang, and compare its "
            "log-probabilities with those of transformers.",
        ),
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="With --rollout: an argument of sglang.Engine."),
    ] = None,
    most: Annotated[
        float, typer.Option(min=0, help="With --rollout: the largest difference that passes.")
    ] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Compare every op with its reference at a model's shapes, forward and gradients."""
    import torch

    from npu_ops_tools import parity

    try:
        check_device(device)
    except ValueError as error:
        fail(error)
    if rollout:
        _rollout(rollout, dtype, device, tokens, engine or (), most, as_json)
    head = f"{model}, {dtype.value}, {device}: errors relative to the tolerance, at most 1"
    try:
        run = parity.run(model, getattr(torch, dtype.value), device, tokens, tp, ops)
        rows = _shown(run, f"{head}\n{parity.HEAD}", parity.line, as_json)
    except (RuntimeError, ValueError) as error:
        fail(error)
    if as_json:
        print_json([dataclasses.asdict(row) for row in rows])
    raise typer.Exit(0 if all(row.passed for row in rows) else 1)


def _shown(rows: Iterable, head: str, line: Callable, as_json: bool) -> list:
    """Print each row as soon as it is available, under the table's head; return all rows."""
    found = []
    for row in rows:
        if not as_json:
            print(line(row) if found else f"{head}\n{line(row)}")
        found.append(row)
    return found


def _rollout(model, dtype, device, tokens, engine, most, as_json) -> NoReturn:
    """Compare log-probabilities of SGLang and transformers (rollout.py), print them and exit."""
    from npu_ops.core import env
    from npu_ops_tools import rollout

    mode = f"NPU_OPS_CONSISTENT={env.settings.consistent_as_set}"
    head = f"{model}, {dtype.value}, {device}, {mode}: log-probabilities"
    try:
        run = rollout.run(model, dtype.value, device, tokens, rollout.settings(engine))
        rows = _shown(run, f"{head}\n{rollout.HEAD}", rollout.line, as_json)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        fail(error)
    if as_json:
        print_json([dataclasses.asdict(row) for row in rows])
    raise typer.Exit(0 if all(row.largest <= most for row in rows) else 1)


@app.command()
def replay(
    file: Annotated[pathlib.Path, typer.Argument(help="A file that NPU_OPS_LOG=shadow:N wrote.")],
    device: Annotated[
        str | None, typer.Option(help="Default: the device on which the result was wrong.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Repeat a call that shadow mode found to be wrong, and compare it with the reference."""
    from npu_ops.core import shadow
    from npu_ops_tools import replay

    try:
        what, errors = replay.replay(file, device)
    except (OSError, RuntimeError, ValueError) as error:
        fail(error)
    passed = all(ratio <= most for ratio, most in errors.values())
    if as_json:
        limits = {name: {"error": e, "allowed": most} for name, (e, most) in errors.items()}
        print_json({"passed": passed, "what": what, "tensors": limits})
    else:
        print(f"{'passed' if passed else 'WRONG'}: {what}: {shadow.shown(errors)}")
    raise typer.Exit(0 if passed else 1)


@app.command()
def fuzz(
    functions: Annotated[
        list[str] | None, typer.Argument(help="Public functions to call; default: all.")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0, help="How long to search.")] = 2.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the search.")] = 0,
    ways: Annotated[
        list[str] | None,
        typer.Option(
            "--way", help="Only this kind of call: eager, compiled, watched, func.grad, ..."
        ),
    ] = None,
    repeat: Annotated[
        str | None,
        typer.Option(metavar="CASE", help="Run only this case, which a finding printed."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Search for calls of the public functions with wrong results, in a clone of the repository.

    Each call is compared with a formula in fp64, or must raise an error that names the argument.
    The exit status is 1 if one is wrong; the command that repeats it is printed.
    """
    from npu_ops_tools import fuzz

    try:
        run = fuzz.load()
        if repeat is None:
            say = (lambda line: None) if as_json else functools.partial(print, flush=True)
            found = run.fuzz(60 * minutes, seed, functions, ways, say)
        else:
            found = run.repeat(repeat)
    except (FileNotFoundError, ImportError, ValueError) as error:
        fail(error)
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in found])
    elif repeat is not None:
        print(found[0] if found else "right")
    raise typer.Exit(1 if found else 0)


app.command("bench")(bench_command)
app.command("report")(report_command)
app.command("compile")(compile_command)
app.command("model")(model_command)
app.command("tune")(tune_command)
app.command("verify")(verify_command)
app.command(context_settings=emulator.CONTEXT)(emulator.emulate)


def main() -> None:
    """The entry point."""
    app()


if __name__ == "__main__":
    main()
