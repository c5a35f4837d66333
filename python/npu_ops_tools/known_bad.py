"""Combinations of versions that are known not to work, with what to do about each."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterable, Mapping

from packaging.version import Version

# What our tests run with, as (torch, torch_npu), torch_npu on the emulated NPU: all of them with
# 2.13, the cases of every op with the others (packaging/versions.py).
TESTED = (("2.7", None), ("2.10", None), ("2.13", "2.13"), ("2.14", "2.14"), ("2.15", None))
CANN_FOLDERS = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")


def problems(versions: Mapping[str, str | None], environ=os.environ) -> Iterable[dict]:
    """{"what", "fix", "source"} of each that this machine has.

    versions: of packages by name, None for those that are not installed.
    """
    for rule in (_two_tritons, _other_torch, _no_cann, _no_extension, _no_pybind, _all_blocks):
        found = rule(versions, environ)
        if found:
            yield dict(zip(("what", "fix", "source"), found, strict=True))


def tested(versions: Mapping[str, str | None]) -> str:
    """Which pairs of torch and torch_npu are tested, and whether this is one."""
    here = tuple(versions.get(name) and _minor(versions[name]) for name in ("torch", "torch_npu"))
    alone = "torch " + ", ".join(torch for torch, npu in TESTED if npu is None)
    with_npu = (f"torch {torch} with torch_npu {npu}" for torch, npu in TESTED if npu)
    pairs = ", ".join((alone, *with_npu))
    alike = [pair for pair in TESTED if pair == here or (here[1] is None and pair[0] == here[0])]
    return f"{pairs}: {'this one' if alike else 'not this one'}"


def _two_tritons(versions, environ):
    if versions.get("triton") and versions.get("triton-ascend"):
        return (
            f"triton {versions['triton']} and triton-ascend {versions['triton-ascend']} are both "
            "installed, and share one folder: whichever came last overwrote the other",
            "pip uninstall -y triton triton-ascend && pip install triton-ascend=="
            + versions["triton-ascend"],
            "verl #4254, triton-ascend #306",
        )
    return None


def _other_torch(versions, environ):
    torch, torch_npu = versions.get("torch"), versions.get("torch_npu")
    if not torch_npu or not torch or _minor(torch) == _minor(torch_npu):
        return None
    return (
        f"torch_npu {torch_npu} belongs to another torch than {torch}",
        f"pip install 'torch_npu=={_minor(torch)}.*', or the torch that it belongs to",
        "sglang #28628",
    )


def _no_cann(versions, environ):
    if not versions.get("torch_npu") or any(name in environ for name in CANN_FOLDERS):
        return None
    return (
        "torch_npu is installed and CANN is not in the environment: `import torch` fails "
        "(libhccl.so), unless TORCH_DEVICE_BACKEND_AUTOLOAD=0",
        "source set_env.sh of the CANN toolkit; without an NPU, uninstall torch_npu",
        "torch_npu 2.13, accelerate #3754",
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
            "triton-ascend cannot be imported without pybind11, which it does not ask for",
            "pip install pybind11",
            "triton-ascend 3.2.0",
        )
    return None


def _all_blocks(versions, environ):
    if environ.get("TRITON_ALL_BLOCKS_PARALLEL", "0") not in ("", "0"):
        return (
            "TRITON_ALL_BLOCKS_PARALLEL is set, with which kernels may wait for each other forever",
            "unset TRITON_ALL_BLOCKS_PARALLEL; ours keep to the grid limit without it",
            "triton-ascend #413",
        )
    return None


def version(package: str) -> str | None:
    """The version that is installed, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _minor(text: str) -> str:
    return ".".join(map(str, Version(text).release[:2]))
