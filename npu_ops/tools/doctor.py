"""What this machine has, which implementation each op takes here, and what is patched."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import warnings
from collections.abc import Iterable

import torch
from rich.console import Console
from rich.table import Table as Grid

import npu_ops
from npu_ops.core import env
from npu_ops.core.registry import as_if_on
from npu_ops.tools.where import ops

PACKAGES = ("torch", "torch_npu", "triton", "triton-ascend", "ascendnpu-ir", "megatron-core",
            "mindspeed", "sglang", "transformers", "flash-linear-attention")  # fmt: skip
CANN_FOLDERS = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")


def collect() -> dict:
    """Everything `npu-ops doctor` shows, as plain data."""
    return {
        "machine": machine(),
        "packages": {name: _version(name) for name in PACKAGES},
        "build": npu_ops.build_info(),
        "switches": {s.variable: os.environ.get(s.variable, s.default) for s in env.SWITCHES},
        "implementations": implementations(),
        "patches": patches(),
    }


def machine() -> dict:
    """The processor and the accelerators, as far as torch has loaded their backends."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "cuda devices": torch.cuda.device_count(),
        "npu devices": torch.npu.device_count() if hasattr(torch, "npu") else 0,
        "CANN": next((os.environ[name] for name in CANN_FOLDERS if name in os.environ), None),
    }


def implementations() -> list[dict]:
    """For each op and device: what would run its first case in bf16, and why not the others."""
    return [
        {"op": op, "device": device, "implementation": row.implementation, "why_not": row.why_not}
        for op, functions in ops().items()
        for device in ("cpu", "npu")
        for row in _explain(op, functions[0], device)
    ]


def _explain(op: str, function: str, device: str):
    case = importlib.import_module(f"npu_ops.ops.{op}.cases").CASES[0]
    with as_if_on(device):
        return npu_ops.explain(function, **case.inputs(torch.bfloat16))


def patches() -> list[dict]:
    """What the adapters replace in the frameworks that are installed, which are imported for it."""
    if importlib.util.find_spec("npu_ops_adapters") is None:
        return []
    adapters = importlib.import_module("npu_ops_adapters")
    failures = _import_frameworks(importlib.import_module("npu_ops_autoload").WATCHED)
    adapters.load_plugins()
    rows = {(row.target, row.op): row for row in (*adapters.plan(), *adapters.verify())}
    return [
        dataclasses.asdict(row) | {"state": failures.get(row.target.partition(":")[0], row.state)}
        for row in rows.values()
    ]


def _import_frameworks(modules: Iterable[str]) -> dict[str, str]:
    """Import the modules that can be patched; what went wrong with each that did not import."""
    failures = {}
    for name in sorted(modules):
        package = name.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            failures[name] = f"{package} is not installed"
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module(name)
        except Exception as error:  # a framework's own trouble is what the doctor is asked about
            failures[name] = f"it does not import: {type(error).__name__}: {error}"
    return failures


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def show(found: dict, console: Console) -> None:
    """Print what `collect` returned."""
    facts = found["machine"] | {name: found["packages"][name] for name in PACKAGES}
    facts["native kernels"] = found["build"]["why_not"] or f"built by {found['build']['compiler']}"
    facts |= {name: value for name, value in found["switches"].items() if value}
    console.print(_grid(("this machine", ""), [(name, value) for name, value in facts.items()]))
    columns = ("op", "on", "implementation", "why not")
    rows = [
        (row["op"], row["device"], row["implementation"], row["why_not"] or "[green]takes it")
        for row in found["implementations"]
    ]
    console.print(_grid(columns, rows))
    rows = [
        (_short(row["target"]), row["op"], row["state"], row["note"]) for row in found["patches"]
    ]
    console.print(_grid(("replaced in frameworks", "op", "state", ""), rows))


def _short(target: str) -> str:
    """ "a.b.c:d" -> "c:d"."""
    module, _, attribute = target.partition(":")
    return f"{module.rpartition('.')[2]}:{attribute}"


def _grid(columns, rows) -> Grid:
    grid = Grid()
    for column in columns:
        grid.add_column(column, overflow="fold")
    for row in rows:
        grid.add_row(*("-" if value in (None, "") else str(value) for value in row))
    return grid
