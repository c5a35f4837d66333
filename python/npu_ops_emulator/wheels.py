"""Installs torch_npu in a separate folder.

With torch_npu in the ordinary environment and no CANN, `import torch` fails. So it is installed
next to the emulator's library, and only emulated processes have that folder on their path.
"""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from npu_ops_emulator.errors import EmulatorError


def version(package: str) -> str:
    """Return the version of a package in this environment, without importing it.

    Raises:
        EmulatorError: the package is not installed.
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise EmulatorError(f"{package} is not installed: pip install {package}") from None


def torch_version() -> str:
    """Return the version of torch."""
    return version("torch")


def torch_npu_version() -> str:
    """Return torch_npu's version for this torch: the pinned one of its release, or the release."""
    release = torch_version().partition("+")[0]
    found = re.search(rf"^torch_npu==({re.escape(release)}(\.post\d+)?) ", _pins(), re.MULTILINE)
    return found[1] if found else release


def cache() -> pathlib.Path:
    """Return the folder of everything that the emulator makes."""
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    versions = f"{torch_version()}-{torch_npu_version()}"
    return pathlib.Path(home) / "npu_ops" / "emulator" / versions


def folder() -> pathlib.Path:
    """Return the folder of torch_npu, which an emulated process has on its path."""
    return cache() / "torch_npu"


def is_installed() -> bool:
    return (folder() / "torch_npu" / "__init__.py").exists()


def include_dirs() -> list[str]:
    """Return the folders of the runtime's C headers in the wheel; needed only to build."""
    package = folder() / "torch_npu" / "include"
    parts = ("", "third_party/acl/inc", "third_party/hccl/inc")
    return [str(package / part) for part in parts]


def pinned() -> str | None:
    """Return the pinned torch_npu and its wheels' SHA-256 as a pip requirement; None if unknown."""
    wanted = f"torch_npu=={torch_npu_version()} "
    return next((line for line in _pins().splitlines() if line.startswith(wanted)), None)


def _pins() -> str:
    """Return the pins, one line for each torch_npu."""
    text = pathlib.Path(__file__).with_name("torch_npu.txt").read_text()
    return text.replace("\\\n", "")


def install(source: str | None = None) -> None:
    """Install torch_npu into `folder()`.

    source: a wheel, or a folder of wheels. By default pip finds the wheel with its configuration,
    and accepts only wheels whose hashes are in `torch_npu.txt`.

    Raises:
        EmulatorError: there is no such wheel.
    """
    cache().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache()) as scratch:
        target = pathlib.Path(scratch) / "torch_npu"
        asked = _given(pathlib.Path(source)) if source else _pinned_only(pathlib.Path(scratch))
        command = [
            sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
            "--no-deps", "--no-compile", "--target", str(target), *asked,
        ]  # fmt: skip
        what = source or f"torch_npu {torch_npu_version()}"
        print(f"npu-ops: installing {what} into {folder()}", file=sys.stderr)
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            python = f"{sys.version_info.major}.{sys.version_info.minor}"
            raise EmulatorError(
                f"torch_npu {torch_npu_version()} for Python {python} could not be installed. "
                "Download its wheel and name it: `npu-ops emulate --torch-npu WHEEL -- ...`, or "
                f"set NPU_OPS_TORCH_NPU. pip said:\n{done.stderr.strip()}"
            )
        target.rename(folder())


def _given(path: pathlib.Path) -> list[str]:
    """Return pip's arguments for a wheel, or for a folder of wheels as the only source."""
    if not path.exists():
        raise EmulatorError(f"torch_npu: {path} does not exist")
    if path.is_file():
        return ["--no-index", str(path)]
    return ["--no-index", "--find-links", str(path), f"torch_npu=={torch_npu_version()}"]


def _pinned_only(scratch: pathlib.Path) -> list[str]:
    """Return pip's arguments for accepting only the pinned wheels."""
    wanted = pinned()
    if wanted is None:
        raise EmulatorError(
            f"torch_npu: got torch {torch_version()}, for which npu-ops knows no torch_npu. "
            "Download its wheel and name it: `npu-ops emulate --torch-npu WHEEL -- ...`"
        )
    (scratch / "wanted.txt").write_text(wanted)
    return ["--require-hashes", "--requirement", str(scratch / "wanted.txt")]
