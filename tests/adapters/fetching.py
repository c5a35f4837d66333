"""Make folders of packages in .cache for PYTHONPATH; a folder is complete or does not exist."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator

CACHE = pathlib.Path(__file__).parents[2] / ".cache"


def tree(folder: pathlib.Path, script: str) -> pathlib.Path:
    """Return the folder that `script` makes.

    Raises:
        FileNotFoundError: the folder does not exist.
    """
    if not folder.exists():
        raise FileNotFoundError(f"{folder} is missing; run {script}")
    return folder


def install(folder: pathlib.Path, *packages: str) -> None:
    """Install `packages` (pip's arguments) without dependencies, unless the folder exists."""
    if not folder.exists():
        with whole(folder) as partial:
            pip("install", "--target", str(partial), *packages)


@contextlib.contextmanager
def whole(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield a folder to fill, which becomes `folder` if nothing is raised."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    print(f"{folder.parent.name} {folder.name}", flush=True)
    yield partial
    partial.rename(folder)


def pip(command: str, *arguments: str) -> None:
    """Run a pip command, with wheels only and without dependencies."""
    subprocess.run(
        [sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check"]
        + ["--no-deps", "--only-binary=:all:", *arguments],
        check=True,
    )
