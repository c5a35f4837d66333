"""Common options of the commands, and functions to check devices, fail and print JSON."""

from __future__ import annotations

import enum
import json
import sys
from typing import Annotated, Any, NoReturn

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Ops = Annotated[list[str] | None, typer.Argument(help="Names of ops; default: all.")]
Only = Annotated[list[str] | None, typer.Option(help="An op; may be repeated; default: all.")]
Modules = Annotated[
    list[str] | None,
    typer.Option("--import", help="Also import this module, e.g. your own implementation."),
]
Device = Annotated[str, typer.Option(help="A torch device: cpu, cuda, npu, npu:1, ...")]


class Dtype(str, enum.Enum):
    """The floating-point dtypes of the kernels."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def device_counts() -> dict[str, int]:
    """Return the number of devices of each type; types without devices are left out."""
    import torch

    from npu_ops.core import hardware

    counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "npu": hardware.npu_count()}
    return {device: count for device, count in counts.items() if count}


def check_device(device: str) -> None:
    """Check that a device exists.

    Raises:
        ValueError: there is no such device here.
    """
    from npu_ops.core import hardware

    here = device_counts()
    kind, separator, number = device.partition(":")
    numbered = number.isascii() and number.isdigit() and int(number) < here.get(kind, 0)
    if kind in here and (numbered or not separator):
        return
    why = f" ({hardware.npu_why_not()})" if kind == "npu" and "npu" not in here else ""
    raise ValueError(
        f"device: got {device}, which is not here{why}, needs one of {', '.join(here)}"
    )


def fail(error: Exception | str) -> NoReturn:
    """Print the error to stderr, and exit with code 2."""
    print(f"npu-ops: {error}", file=sys.stderr)
    raise typer.Exit(2)


def print_json(found: Any) -> None:
    """Print plain data as JSON; other objects are printed as text."""
    print(json.dumps(found, indent=1, default=str))
