"""Reports this machine's versions, each op's implementation, patches and problems."""

from __future__ import annotations

import enum
import importlib
import importlib.util
import os
import pathlib
import platform
import sys
import textwrap
import warnings
from collections.abc import Iterable, Iterator

import npu_ops_adapters
import npu_ops_emulator
import torch
from npu_ops_adapters import State

import npu_ops
from npu_ops.core import cases, env, hardware, preferences
from npu_ops.core.registry import Table, as_if_on
from npu_ops_tools import known_bad, support
from npu_ops_tools.options import device_counts
from npu_ops_tools.where import ops

PACKAGES = {  # package -> module to import; a checkout is only found by its module
    "torch": "torch", "torch_npu": "torch_npu", "triton": None, "triton-ascend": None,
    "pybind11": "pybind11", "ascendnpu-ir": None, "megatron-core": "megatron.core",
    "mindspeed": "mindspeed", "sglang": "sglang", "sgl-kernel-npu": "sgl_kernel_npu",
    "transformers": "transformers", "flash-linear-attention": "fla",
    "causal-conv1d": "causal_conv1d", "kernels": "kernels", "ray": "ray", "verl": "verl",
    "slime": "slime", "relax": "relax", "vllm": "vllm", "vllm-ascend": "vllm_ascend",
}  # fmt: skip
NAMESPACES = {"megatron"}  # top-level modules that several packages share
WIDTH = 80


class Missing(str, enum.Enum):
    """Reason why a module could not be imported."""

    PACKAGE = "not installed"
    MODULE = "not in this version"
    BROKEN = "does not import"

    __str__ = str.__str__


ABSENT = (State.WAITING, Missing.PACKAGE, Missing.MODULE)
AT_REST = (State.APPLIED, State.DISABLED, State.KEPT, *ABSENT)
_REMOVABLE = (State.APPLIED, State.CAPTURED)
_NOT_REGISTERED = "the adapters were not registered (TORCH_DEVICE_BACKEND_AUTOLOAD=0?)"


def collect(modules: Iterable[str] = ()) -> dict:
    """Return everything that `npu-ops doctor` shows, as plain data.

    modules: further modules to import after the frameworks, to see what they do to npu-ops'
    patches.
    """
    # first: it imports the frameworks, which makes their versions available
    patched = patches(modules)
    versions = {name: version(name, module) for name, module in PACKAGES.items()}
    found = {
        "machine": machine(),
        "packages": versions,
        "build": npu_ops.build_info(),
        "switches": {s.variable: os.environ.get(s.variable, s.default) for s in env.SWITCHES},
        "support": support.standing(versions),
        "torch_npu": None
        if versions["torch_npu"]
        else known_bad.install_torch_npu(torch.__version__),
        "known bad": list(known_bad.problems(versions)),
        "implementations": implementations(),
        "preferences": tuned(),
        "patches": patched,
    }
    return found | {"not in force": list(not_in_force(found))}


def version(package: str, module: str | None) -> str | None:
    """Return the version of an installed package, or of a checkout on the path.

    "unknown" for a checkout without a version, or one that is not imported.
    """
    installed = known_bad.version(package)
    if installed or module is None or not is_there(module):
        return installed
    return str(getattr(sys.modules.get(module), "__version__", "unknown"))


def machine() -> dict:
    """Return the processor and the accelerators, as far as torch has loaded their backends.

    None for missing ones.
    """
    why_not = hardware.npu_why_not()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "processor": hardware.processor(),
        "threads": torch.get_num_threads(),
        "cuda devices": torch.cuda.device_count() or None,
        "npu devices": hardware.npu_count() or None,
        "no npu because": why_not if is_there("torch_npu") or hasattr(torch, "npu") else None,
        "SoC": hardware.npu_name(),
        "emulated": "the NPUs are emulated in software" if npu_ops_emulator.installed() else None,
        "CANN": _cann(),
    }


def devices() -> list[str]:
    """Return the device types of this machine."""
    return list(device_counts())


def implementations() -> list[dict]:
    """Return, for each op and device, which implementation would run its first case in bf16.

    `why_not` says why an implementation would not run; None for the one that would.
    """
    return [
        {"op": op, "device": device, "implementation": row.implementation, "why_not": row.why_not}
        for op, functions in ops().items()
        for device in devices()
        for row in _explain(op, functions[0], device)
    ]


def tuned() -> list[dict]:
    """Return the tables of `npu-ops tune` that apply to this machine's devices.

    All ranks of a job must have the same fingerprint.
    """
    found = []
    for device in devices():
        path = preferences.path_of(device)
        if path is None:
            continue
        rows = preferences.read(path)["rows"]
        others = sum(row["implementation"] != row["instead_of"] for row in rows)
        about = {"device": device, "path": str(path), "classes": len(rows), "changed": others}
        found.append(about | {"fingerprint": preferences.fingerprint(device)})
    return found


def _explain(op: str, function: str, device: str):
    case = cases.of(op).CASES[0]
    with as_if_on(device):
        return npu_ops.explain(function, **case.inputs(torch.bfloat16))


def patches(modules: Iterable[str] = ()) -> list[dict]:
    """Import the installed frameworks, and return the patches that the adapters apply to them.

    state, detail: a `State` or `Missing`, and its reason. sentence: both as text.
    removable: whether revert() can restore the framework's own function.
    remove_when: when the patch can be deleted from npu-ops.
    """
    failures = _import_frameworks(npu_ops_adapters.modules()) | _import_frameworks(modules)
    npu_ops_adapters.load_plugins()
    known = {patch.key: patch for patch in npu_ops_adapters.patches()}
    rows = {row.key: row for row in (*npu_ops_adapters.plan(), *npu_ops_adapters.verify())}
    return [
        _patch(row, known.get(key), *failures.get(row.target.partition(":")[0], ()))
        for key, row in rows.items()
    ]


def _patch(row, patch, missing: Missing | None = None, trouble: str = "") -> dict:
    state, detail = (missing, trouble) if missing else (row.state, row.detail)
    sentence = ": ".join(filter(None, (missing, trouble))) if missing else row.sentence
    return {
        "target": row.target,
        "op": row.op,
        "state": str(state),
        "detail": detail,
        "sentence": sentence,
        "note": row.note,
        "removable": state in _REMOVABLE,
        "why": patch.why if patch else "",
        "remove_when": patch.remove_when if patch else "",
    }


def not_in_force(found: dict) -> Iterator[str]:
    """Yield a sentence for each requested feature, installed or switched on, that is not active."""
    if found["build"]["broken"]:
        yield f"native kernels: {found['build']['why_not']}"
    built, here = found["build"]["cann"], known_bad.cann_folder()
    if built and here and built != os.path.realpath(here):
        yield f"AscendC kernels: built with {built}, but the CANN here is {os.path.realpath(here)}"
    for (package, reason), rows in by_reason(found["patches"]).items():
        if rows[0]["state"] not in AT_REST:
            names = ", ".join(dict.fromkeys(row["op"] for row in rows))
            what = f"{package}, {len(rows)} patches" if len(rows) > 1 else rows[0]["target"]
            yield f"{what} ({names}): {reason}"
    accelerated = found["machine"]["npu devices"] or found["machine"]["cuda devices"]
    taken = {(row["op"], row["implementation"]) for row in found["implementations"]
             if row["why_not"] is None and (row["device"] == "cpu" or accelerated)}  # fmt: skip
    for op, name in env.settings.impl.items():
        if op in ops() and (op, name) not in taken:
            yield f"NPU_OPS_IMPL={op}={name}: this implementation runs on no device here"
        elif op.removesuffix("_backward") not in Table.tables:
            yield f"NPU_OPS_IMPL={op}={name}: there is no such op"


def always_bad(found: dict) -> Iterator[dict]:
    """Return the known faults that affect every program, not only certain calls."""
    return (problem for problem in found["known bad"] if not problem.get("when"))


def by_reason(rows: list[dict]) -> dict[tuple[str, str], list[dict]]:
    """Group the patches by package and by the reason for their state."""
    groups = {}
    for row in rows:
        key = _package(row["target"].partition(":")[0]), _reason(row)
        groups.setdefault(key, []).append(row)
    return groups


def _reason(row: dict) -> str:
    return _NOT_REGISTERED if row["state"] == State.READY else row["sentence"]


def _import_frameworks(modules: Iterable[str]) -> dict[str, tuple[Missing, str]]:
    """Import the modules; return the reason and the error of each failed import, by module."""
    failures = {}
    for name in sorted(modules):
        if not is_there(_package(name)):
            failures[name] = Missing.PACKAGE, ""
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module(name)
        except ModuleNotFoundError as error:
            absent = error.name and f"{name}.".startswith(f"{error.name}.")
            failures[name] = (Missing.MODULE, "") if absent else _trouble(error)
        except Exception as error:  # any error: reporting it is the purpose of doctor
            failures[name] = _trouble(error)
    return failures


def _package(module: str) -> str:
    """Return the package of a module: "sglang.srt.models" -> "sglang"; "megatron.bridge.models" ->
    "megatron.bridge"."""
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] in NAMESPACES else 1])


def is_there(module: str) -> bool:
    """Return whether a module is installed, or a checkout of it is on the path."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # its parent is missing, or is a module made by hand
        return module in sys.modules


def _trouble(error: Exception) -> tuple[Missing, str]:
    return Missing.BROKEN, f"{type(error).__name__}: {hardware.first_line(error)}"


def _cann() -> str | None:
    """Return the folder of CANN, with its version if known."""
    folder = known_bad.cann_folder()
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
    """Format what `collect` returned for the terminal."""
    ops = (*_ops(found["implementations"]), *_tuned(found["preferences"]))
    parts = (_machine(found), ops, _patches(found["patches"]))
    return "\n\n".join("\n".join(part) for part in (*parts, _verdict(found)))


def _machine(found: dict) -> Iterator[str]:
    yield "this machine"
    facts = {name: value for name, value in found["machine"].items() if value is not None}
    facts["native kernels"] = found["build"]["why_not"] or f"built by {found['build']['compiler']}"
    facts |= {name: value for name, value in found["switches"].items() if value}
    for name, value in facts.items():
        yield from line(f"  {name:20}", value)
    here = [f"{name} {version}" for name, version in found["packages"].items() if version]
    absent = [name for name, version in found["packages"].items() if not version]
    yield from line(f"  {'packages':20}", ", ".join(here))
    yield from line(f"  {'not installed':20}", ", ".join(absent))
    yield from line(f"  {'support':20}", found["support"])
    if found.get("torch_npu"):
        yield from line(f"  {'for NPUs':20}", found["torch_npu"])


def _ops(rows: list[dict]) -> Iterator[str]:
    taken = {
        (row["op"], row["device"]): row["implementation"] for row in rows if row["why_not"] is None
    }
    here = list(dict.fromkeys(row["device"] for row in rows))
    yield f"{'op':34}" + "".join(f"{f'on {device}':16}" for device in here).rstrip()
    declined = {}
    for op in dict.fromkeys(row["op"] for row in rows):
        shown = (f"{taken.get((op, device), 'nothing'):16}" for device in here)
        yield f"{op:34}" + "".join(shown).rstrip()
    for row in rows:
        if row["why_not"] and not _goes_without_saying(row["why_not"]):
            group = row["implementation"], row["device"], row["why_not"]
            declined.setdefault(group, []).append(row["op"])
    for (implementation, device, why_not), names in declined.items():
        yield from line(f"  not {implementation} on {device}: ", f"{', '.join(names)}: {why_not}")


def _tuned(tables: list[dict]) -> Iterator[str]:
    for table in tables:
        yield from line(
            f"  tuned for {table['device']}: ",
            f"tuning changed the implementation of {table['changed']} of "
            f"{table['classes']} classes of calls, "
            f"{table['path']} ({table['fingerprint']})",
        )


def _goes_without_saying(why_not: str) -> bool:
    return "comes first" in why_not or why_not.startswith("tensors are on")


def _patches(rows: list[dict]) -> Iterator[str]:
    """Format patches by package and reason, with each op's patched functions and their modules."""
    yield "replaced in frameworks"
    for (package, reason), members in by_reason(rows).items():
        count = "1 patch" if len(members) == 1 else f"{len(members)} patches"
        amiss = "" if members[0]["state"] in AT_REST else "NOT IN FORCE: "
        yield from line("  ", f"{package}, {count}: {amiss}{reason}")
        if members[0]["state"] not in ABSENT:
            for op in dict.fromkeys(row["op"] for row in members):
                yield from line(f"    {op}: ", _functions([r for r in members if r["op"] == op]))
    removable = sum(row["removable"] for row in rows)
    yield f"  {removable} patches can be undone: npu_ops_adapters.revert()"


def _functions(rows: list[dict]) -> str:
    """Name the patched functions by module: "apply_rotary_pos_emb of qwen2, qwen3; ..."."""
    places = {}
    for row in rows:
        module, _, function = row["target"].partition(":")
        note = f" ({row['note']})" if row["note"] else ""
        places.setdefault(function, []).append(_short(module) + note)
    return "; ".join(f"{function} of {', '.join(names)}" for function, names in places.items())


def _verdict(found: dict) -> Iterator[str]:
    for problem in found["known bad"]:
        yield from line("KNOWN BAD: ", problem["what"])
        yield from line("      fix: ", problem["fix"])
        yield from line("      see: ", problem["source"])
    for sentence in found["not in force"]:
        yield from line("NOT IN FORCE: ", sentence)
    if not list(always_bad(found)) and not found["not in force"]:
        yield "nothing amiss otherwise" if found["known bad"] else "nothing amiss"


def line(head: str, value) -> list[str]:
    """Wrap `head` and a text; further lines are indented below the text."""
    deeper = len(head) - len(head.lstrip()) + 4 if head.endswith(": ") else len(head)
    return textwrap.wrap(
        str(value) or "-", WIDTH, initial_indent=head, subsequent_indent=" " * deeper,
        break_on_hyphens=False,
    )  # fmt: skip


def _short(module: str) -> str:
    """Shorten a module name: "a.b.modeling_x" -> "x"."""
    return module.rpartition(".")[2].removeprefix("modeling_")
