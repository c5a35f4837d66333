"""Finds combinations of versions that are known to fail, and names a fix for each."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterable, Mapping

from packaging.utils import canonicalize_name
from packaging.version import Version

CANN_FOLDERS = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")


def problems(versions: Mapping[str, str | None], environ=os.environ) -> Iterable[dict]:
    """Yield {"what", "fix", "source", "when"} for each known problem of this machine.

    when: "" if every program is affected, else the affected calls.
    versions: package -> version, None if it is not installed.
    """
    rules = dict.fromkeys(
        (
            _two_tritons,
            _two_torch_npu,
            _other_torch,
            _no_cann,
            _two_canns,
            _no_extension,
            _no_pybind,
            _all_blocks,
        ),
        "",
    )
    for rule, when in (rules | {_wrong_slice: "torch.compile(dynamic=True)"}).items():
        found = rule(versions, environ)
        if found:
            yield dict(zip(("what", "fix", "source"), found, strict=True)) | {"when": when}


def install_torch_npu(torch: str) -> str:
    """Return the command that installs torch_npu for a version of torch without changing torch."""
    return f"pip install --no-deps 'torch_npu=={release(torch)}.*' && pip install pyyaml"


def _two_tritons(versions, environ):
    if versions.get("triton") and versions.get("triton-ascend"):
        return (
            f"triton {versions['triton']} and triton-ascend {versions['triton-ascend']} are both "
            "installed, and share one folder: the later installation overwrote the other",
            "pip uninstall -y triton triton-ascend && pip install triton-ascend=="
            + versions["triton-ascend"],
            "verl #4254, triton-ascend #306",
        )
    return None


def _two_torch_npu(versions, environ):
    found = dict.fromkeys(
        f"{each.version} in {each.locate_file('')}"
        for each in importlib.metadata.distributions()
        if canonicalize_name(each.metadata["Name"] or "") == "torch-npu"
    )
    if len(found) < 2:
        return None
    return (
        f"torch_npu is installed more than once: {', '.join(found)}; Python imports the first",
        "uninstall torch_npu until pip finds none, then install the one for this torch",
        "Ascend/pytorch #99",
    )


def _other_torch(versions, environ):
    torch, torch_npu = versions.get("torch"), versions.get("torch_npu")
    if not torch_npu or not torch or minor(torch) == minor(torch_npu):
        return None
    return (
        f"torch_npu {torch_npu} is for another version of torch than {torch}",
        f"{install_torch_npu(torch)}; or install the torch that it is for",
        "sglang #28628",
    )


def _no_cann(versions, environ):
    if not versions.get("torch_npu") or any(name in environ for name in CANN_FOLDERS):
        return None
    return (
        "torch_npu is installed, but CANN is not in the environment: `import torch` fails "
        "(libhccl.so), unless TORCH_DEVICE_BACKEND_AUTOLOAD=0",
        "source set_env.sh of the CANN toolkit; without an NPU, uninstall torch_npu",
        "torch_npu 2.13, accelerate #3754",
    )


def _two_canns(versions, environ):
    folders = {name: os.path.realpath(environ[name]) for name in CANN_FOLDERS if name in environ}
    if len(set(folders.values())) < 2:
        return None
    return (
        "two versions of CANN were sourced: "
        + ", ".join(f"{name} is {folder}" for name, folder in folders.items()),
        "source set_env.sh of one CANN in a new shell",
        "CANN's set_env.sh",
    )


def _no_extension(versions, environ):
    ascend, sglang = versions.get("triton-ascend"), versions.get("sglang")
    if not (ascend and sglang and versions.get("torch_npu")) or Version(ascend) >= Version("3.2.1"):
        return None
    return (
        f"sglang {sglang} on NPUs imports triton.language.extra.cann, which triton-ascend {ascend} "
        "does not have: the server does not start",
        "install triton-ascend 3.2.1 or later, with CANN 9",
        "sglang #34344",
    )


def _no_pybind(versions, environ):
    if versions.get("triton-ascend") and not versions.get("pybind11"):
        return (
            "triton-ascend cannot be imported without pybind11, which its package does not require",
            "pip install pybind11",
            "triton-ascend 3.2.0",
        )
    return None


def _all_blocks(versions, environ):
    if environ.get("TRITON_ALL_BLOCKS_PARALLEL", "0") not in ("", "0"):
        return (
            "TRITON_ALL_BLOCKS_PARALLEL is set, so kernels may wait for each other forever",
            "unset TRITON_ALL_BLOCKS_PARALLEL; npu-ops' kernels keep the grid limit without it",
            "triton-ascend #413",
        )
    return None


def _wrong_slice(versions, environ):
    if not versions.get("torch") or minor(versions["torch"]) != "2.13":
        return None
    return (
        "torch.compile(dynamic=True) of torch 2.13 writes pool[:, 0] where an operator that writes "
        "in place gets pool[:, 1], if the pool has 4 dimensions or more",
        "compile without dynamic=True, or set "
        "torch._inductor.config.enable_auto_functionalized_v2 = False",
        "docs/help.md, Faults of torch",
    )


def cann_folder() -> str | None:
    """Return the folder of CANN that the environment names, or None."""
    return next((os.environ[name] for name in CANN_FOLDERS if name in os.environ), None)


def version(package: str) -> str | None:
    """Return the installed version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def release(text: str) -> str:
    """Return the release: 2.9.0 for 2.9.0.post9 and for 2.9.0+cpu."""
    return ".".join(map(str, Version(text).release[:3]))


def minor(text: str) -> str:
    """Return the minor release: 2.9 for 2.9.0.post9."""
    return ".".join(map(str, Version(text).release[:2]))
