"""Make .cache/vllm: vLLM's and vllm-ascend's Python, and the packages they need on a CPU.

python tests/adapters/fetch_vllm.py

vLLM's wheel has 0.4 GB of CUDA code. Its source installs without native code, as vllm-ascend's
instructions describe. torch is the environment's. torchvision's binary does not load with it; its
Python works, after two operators are declared.
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
READ = "0.23.0"
BUILDS = FOLDER / "setuptools-scm-8.3.1"  # vLLM's setup.py needs it
HERE = pathlib.Path(__file__).parent
REQUIREMENTS = HERE / "vllm_cpu" / "requirements.txt"
ENGINE = HERE / "vllm_npu" / "requirements.txt"
SERVER = HERE / "vllm_server" / "requirements.txt"


def tree() -> pathlib.Path:
    """Return the folder for PYTHONPATH. Raises FileNotFoundError if it was not made."""
    return fetching.tree(FOLDER / VERSION, "tests/adapters/fetch_vllm.py")


def engine() -> pathlib.Path:
    """Return the folder that precedes `tree` on PYTHONPATH for vLLM's engine."""
    return fetching.tree(FOLDER / f"engine-{VERSION}", "tests/adapters/fetch_vllm.py")


def server() -> list[pathlib.Path]:
    """Return the folders for PYTHONPATH of verl and the vLLM that it starts, in their order."""
    packages = fetching.tree(FOLDER / f"server-{VERSION}", "tests/adapters/fetch_vllm.py")
    return [SERVER.parent, packages, engine(), tree()]


def ascend() -> pathlib.Path:
    """Return a later vllm-ascend, whose sources tests read; to run it would need another vLLM."""
    return fetching.tree(FOLDER / f"ascend-{READ}", "tests/adapters/fetch_vllm.py")


def fetch() -> None:
    """Download everything, unless the folders exist."""
    fetching.install(FOLDER / f"ascend-{READ}", f"vllm-ascend=={READ}")
    fetching.install(BUILDS, "setuptools-scm==8.3.1")
    for name, requirements in {"engine": ENGINE, "server": SERVER}.items():
        folder = FOLDER / f"{name}-{VERSION}"
        fetching.install(folder, "--no-compile", "--requirement", str(requirements))
    if (FOLDER / VERSION).exists():
        return
    print("0.2 GB, a minute", flush=True)
    with fetching.whole(FOLDER / VERSION) as partial:
        into = ("--no-compile", "--target", str(partial))
        fetching.pip(
            "install", *into, f"vllm-ascend=={VERSION}", "--requirement", str(REQUIREMENTS)
        )
        _build(*into)
        with open(partial / "torchvision" / "extension.py", "a") as extension:
            extension.write(DECLARED)


def _build(*into: str) -> None:
    """Install vLLM from its source, without native code."""
    path = os.pathsep.join(filter(None, (str(BUILDS), os.environ.get("PYTHONPATH"))))
    settings = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": VERSION}
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        + ["--no-deps", "--no-build-isolation", "--no-binary=vllm", *into, f"vllm=={VERSION}"],
        env=os.environ | {"PYTHONPATH": path} | settings,
        check=True,
    )


if __name__ == "__main__":
    fetch()
