"""Make .cache/vllm: vLLM's and vllm-ascend's Python, and the packages they need on a CPU.

python tests/adapters/fetch_vllm.py           for vLLM 0.18.0, and the source of vllm-ascend 0.23.0
python tests/adapters/fetch_vllm.py 0.23.0    also vLLM 0.23.0

vLLM's wheel has 0.4 GB of CUDA code. Its source installs without native code, as vllm-ascend's
instructions describe. torch is the environment's. torchvision's binary does not load with it; its
Python works, after two operators are declared.

The folder of 0.23.0 has only the packages of another version than in the folders of 0.18.0, which
follow it on PYTHONPATH.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import fetching
from fetch_sglang import DECLARED

FOLDER = fetching.CACHE / "vllm"
VERSION = "0.18.0"
LATER = "0.23.0"
VERSIONS = (VERSION, LATER)
BUILDS = FOLDER / "builds"  # vLLM's setup.py needs them
HERE = pathlib.Path(__file__).parent
REQUIREMENTS = HERE / "vllm_cpu" / "requirements.txt"
CHANGED = HERE / "vllm_cpu" / f"requirements-{LATER}.txt"
ENGINE = HERE / "vllm_npu" / "requirements.txt"
SERVER = HERE / "vllm_server" / "requirements.txt"
SCRIPT = "tests/adapters/fetch_vllm.py"


def folder(name: str) -> pathlib.Path:
    """Return a folder of .cache/vllm. Raises FileNotFoundError if it was not made."""
    return fetching.tree(FOLDER / name, f"{SCRIPT} {LATER if name == LATER else ''}".strip())


def modules(version: str = VERSION) -> list[pathlib.Path]:
    """Return the folders for PYTHONPATH of vLLM's and vllm-ascend's modules, in their order."""
    if version == VERSION:
        return [folder(VERSION)]
    return [folder(LATER), ascend(), folder(f"server-{VERSION}"), *engine()]


def engine(version: str = VERSION) -> list[pathlib.Path]:
    """Return the folders for PYTHONPATH of vLLM's engine."""
    if version == VERSION:
        return [folder(f"engine-{VERSION}"), *modules()]
    return modules(version)


def server() -> list[pathlib.Path]:
    """Return the folders for PYTHONPATH of verl and the vLLM that it starts, in their order."""
    return [SERVER.parent, folder(f"server-{VERSION}"), *engine()]


def ascend() -> pathlib.Path:
    """Return the folder of vllm-ascend 0.23.0, without the vLLM that it needs."""
    return folder(f"ascend-{LATER}")


def fetch() -> None:
    """Download 0.18.0 and the source of vllm-ascend 0.23.0, unless the folders exist."""
    fetching.install(FOLDER / f"ascend-{LATER}", f"vllm-ascend=={LATER}")
    for name, requirements in {"engine": ENGINE, "server": SERVER}.items():
        fetching.install(
            FOLDER / f"{name}-{VERSION}", "--no-compile", "--requirement", str(requirements)
        )
    _install(VERSION, f"vllm-ascend=={VERSION}", "--requirement", str(REQUIREMENTS))


def fetch_later() -> None:
    """Download vLLM 0.23.0, unless the folder exists."""
    _install(LATER, "--requirement", str(CHANGED))


def _install(version: str, *packages: str) -> None:
    """Install vLLM and other packages (pip's arguments) into a folder, unless it exists."""
    if (FOLDER / version).exists():
        return
    print("0.2 GB, a minute", flush=True)
    fetching.install(BUILDS, "setuptools-scm==8.3.1", "setuptools-rust==1.13.0", "semantic_version")
    with fetching.whole(FOLDER / version) as partial:
        into = ("--no-compile", "--target", str(partial))
        fetching.pip("install", *into, *packages)
        _build(version, *into)
        with open(partial / "torchvision" / "extension.py", "a") as extension:
            extension.write(DECLARED)


def _build(version: str, *into: str) -> None:
    """Install vLLM from its source, without native code.

    Its server in Rust is optional, and would take minutes.
    """
    path = os.pathsep.join(filter(None, (str(BUILDS), os.environ.get("PYTHONPATH"))))
    settings = {
        "VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": version, "CARGO": "false"
    }  # fmt: skip
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        + ["--no-deps", "--no-build-isolation", "--no-binary=vllm", *into, f"vllm=={version}"],
        env=os.environ | {"PYTHONPATH": path} | settings,
        check=True,
    )


if __name__ == "__main__":
    fetch()
    if LATER in sys.argv[1:]:
        fetch_later()
