"""What this machine has, which implementation each op takes, what is patched, what is amiss."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import pathlib
import platform
import textwrap
import warnings
from collections.abc import Iterable, Iterator

import torch

import npu_ops
from npu_ops.core import env, hardware
from npu_ops.core.registry import as_if_on
from npu_ops_tools import known_bad
from npu_ops_tools.where import ops

PACKAGES = (
    "torch", "torch_npu", "triton", "triton-ascend", "pybind11", "ascendnpu-ir", "megatron-core",
    "mindspeed", "sglang", "sgl-kernel-npu", "transformers", "flash-linear-attention",
    "causal-conv1d", "kernels", "ray", "verl", "slime",
)  # fmt: skip
WIDTH = 80
_VERDICTS = {  # by how the state of a patch begins
    "applied": "applied",
    "apply": "not registered",
    "refused": "refused",
    "overwritten by": "overwritten",
    "captured too early by": "too late",
    "disabled by": "disabled",
    "it does not import": "broken",
}
_ABSENT = ("is not installed", "has no such module", "module not imported yet")
_NOT_REGISTERED = "the adapters were not registered (TORCH_DEVICE_BACKEND_AUTOLOAD=0?)"


def collect(modules: Iterable[str] = ()) -> dict:
    """Everything `npu-ops doctor` shows, as plain data.

    modules: are imported after the frameworks, for what they do to our patches.
    """
    versions = {name: known_bad.version(name) for name in PACKAGES}
    found = {
        "machine": machine(),
        "packages": versions,
        "build": npu_ops.build_info(),
        "switches": {s.variable: os.environ.get(s.variable, s.default) for s in env.SWITCHES},
        "known bad": list(known_bad.problems(versions)),
        "implementations": implementations(),
        "patches": patches(modules),
    }
    return found | {"not in force": list(not_in_force(found))}


def machine() -> dict:
    """The processor and the accelerators, as far as torch has loaded their backends."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "cuda devices": torch.cuda.device_count(),
        "npu devices": hardware.npu_count(),
        "no npu because": hardware.npu_why_not(),
        "SoC": hardware.npu_name(),
        "CANN": _cann(),
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


def patches(modules: Iterable[str] = ()) -> list[dict]:
    """What the adapters replace in the frameworks that are installed, which are imported for it.

    `removable`: revert() puts the framework's own back. `remove_when`: it can go for good.
    """
    if importlib.util.find_spec("npu_ops_adapters") is None:
        return []
    adapters = importlib.import_module("npu_ops_adapters")
    failures = _import_frameworks(importlib.import_module("npu_ops_autoload").WATCHED)
    failures |= _import_frameworks(modules)
    adapters.load_plugins()
    known = {(patch.target, patch.op): patch for patch in adapters.patches()}
    rows = {(row.target, row.op): row for row in (*adapters.plan(), *adapters.verify())}
    return [
        _patch(row, known.get(key), failures.get(row.target.partition(":")[0], row.state))
        for key, row in rows.items()
    ]


def _patch(row, patch, state: str) -> dict:
    verdict = _verdict_on(state)
    return dataclasses.asdict(row) | {
        "state": state,
        "verdict": verdict,
        "removable": verdict in ("applied", "too late"),
        "why": patch.why if patch else "",
        "remove_when": patch.remove_when if patch else "",
    }


def _verdict_on(state: str) -> str:
    """A state in a word or two."""
    for beginning, verdict in _VERDICTS.items():
        if state.startswith(beginning):
            return verdict
    return "absent" if state.endswith(_ABSENT) else state


def not_in_force(found: dict) -> Iterator[str]:
    """A sentence for each thing that was asked for and is not so: by installing it, or a switch."""
    for row in found["patches"]:
        if row["verdict"] not in ("applied", "disabled", "absent"):
            state = _NOT_REGISTERED if row["verdict"] == "not registered" else row["state"]
            yield f"{row['target']} ({row['op']}): {state}"
    taken = {(row["op"], row["implementation"]) for row in found["implementations"]
             if row["why_not"] is None}  # fmt: skip
    for op, name in env.settings.impl.items():
        if op in ops() and (op, name) not in taken:
            yield f"NPU_OPS_IMPL={op}={name}: it runs on no device here"
        elif op.removesuffix("_backward") not in ops():
            yield f"NPU_OPS_IMPL={op}={name}: there is no such op"


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
        except ModuleNotFoundError as error:
            absent = error.name and f"{name}.".startswith(f"{error.name}.")
            failures[name] = "this version has no such module" if absent else _trouble(error)
        except Exception as error:  # a framework's own trouble is what the doctor is asked about
            failures[name] = _trouble(error)
    return failures


def _trouble(error: Exception) -> str:
    return f"it does not import: {type(error).__name__}: {hardware.first_line(error)}"


def _processor() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def _cann() -> str | None:
    """The folder of CANN, with its version where it says one."""
    folder = next((os.environ[n] for n in known_bad.CANN_FOLDERS if n in os.environ), None)
    if folder is None:
        return None
    for name in ("compiler/version.info", "version.cfg"):
        path = pathlib.Path(folder, name)
        for line in path.read_text().splitlines() if path.exists() else ():
            if line.lower().startswith("version="):
                return f"{line.partition('=')[2].strip()} ({folder})"
    return folder


# As text, at most 80 columns


def text(found: dict) -> str:
    """What `collect` returned."""
    parts = (_machine(found), _ops(found["implementations"]), _patches(found["patches"]))
    return "\n\n".join("\n".join(part) for part in (*parts, _verdict(found)))


def _machine(found: dict) -> Iterator[str]:
    yield "this machine"
    facts = {name: value for name, value in found["machine"].items() if value is not None}
    facts["native kernels"] = found["build"]["why_not"] or f"built by {found['build']['compiler']}"
    facts |= {name: value for name, value in found["switches"].items() if value}
    for name, value in facts.items():
        yield from _line(f"  {name:16}", value)
    here = [f"{name} {version}" for name, version in found["packages"].items() if version]
    absent = [name for name, version in found["packages"].items() if not version]
    yield from _line(f"  {'packages':16}", ", ".join(here))
    yield from _line(f"  {'not installed':16}", ", ".join(absent))


def _ops(rows: list[dict]) -> Iterator[str]:
    taken = {
        (row["op"], row["device"]): row["implementation"] for row in rows if row["why_not"] is None
    }
    yield f"{'op':34}{'on cpu':18}on npu"
    for op in dict.fromkeys(row["op"] for row in rows):
        yield f"{op:34}{taken.get((op, 'cpu'), 'nothing'):18}{taken.get((op, 'npu'), 'nothing')}"
        for row in rows:
            declined = row["why_not"] and "comes first" not in row["why_not"]
            if row["op"] == op and declined and not row["why_not"].startswith("tensors are on"):
                yield from _line(
                    f"    not {row['implementation']} on {row['device']}: ", row["why_not"]
                )


def _patches(rows: list[dict]) -> Iterator[str]:
    yield "replaced in frameworks"
    if not rows:
        yield "  the adapters are not installed"
    groups, absent = {}, {}
    for row in rows:
        package = row["target"].partition(".")[0]
        if row["state"] == f"{package} is not installed":
            absent[package] = absent.get(package, 0) + 1
        else:
            groups.setdefault(f"{package}, {row['op']}", []).append(row)
    for group, members in groups.items():
        yield f"  {group}"
        for row in members:
            yield from _row(row)
    for package, count in absent.items():
        yield f"  {package} is not installed: {count} patches wait for it"
    removable = sum(row["removable"] for row in rows)
    yield f"  {removable} can be undone: npu_ops_adapters.revert()"


def _row(row: dict) -> Iterator[str]:
    verdict = row["verdict"] if row["verdict"] == "applied" else row["verdict"].upper()
    yield f"    {_short(row['target'])[-58:]:60}{verdict[:16]}"
    for sentence in (row["state"] if verdict != "applied" else "", row["note"]):
        if sentence:
            yield from _line("        ", sentence)


def _verdict(found: dict) -> Iterator[str]:
    for problem in found["known bad"]:
        yield from _line("KNOWN BAD: ", problem["what"])
        yield from _line("      fix: ", problem["fix"])
        yield from _line("      see: ", problem["source"])
    for sentence in found["not in force"]:
        yield from _line("NOT IN FORCE: ", sentence)
    if not found["known bad"] and not found["not in force"]:
        yield "nothing amiss"


def _line(head: str, value) -> list[str]:
    """`head` and a text that goes on below itself."""
    return textwrap.wrap(
        str(value) or "-", WIDTH, initial_indent=head, subsequent_indent=" " * min(len(head), 18),
        break_on_hyphens=False,
    )  # fmt: skip


def _short(target: str) -> str:
    """ "a.b.modeling_x:d" -> "x:d"."""
    module, _, attribute = target.partition(":")
    return f"{module.rpartition('.')[2].removeprefix('modeling_')}:{attribute}"
