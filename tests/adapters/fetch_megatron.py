"""Downloads the megatron-core releases that the adapters are tested with into .cache/megatron.

python tests/adapters/fetch_megatron.py [VERSION...]
"""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys

FOLDER = pathlib.Path(__file__).parents[2] / ".cache" / "megatron"
VERSIONS = ("0.12.3", "0.13.1", "0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2")
# Published for Python 3.12 and later only; what is Python in them runs on 3.10 too.
NEEDS_PYTHON_312 = ("0.17.1", "0.18.2", "0.19.2")


def tree(version: str) -> pathlib.Path:
    """The folder to put on PYTHONPATH.

    Raises:
        FileNotFoundError: it was not downloaded.
    """
    folder = FOLDER / version
    if not folder.exists():
        raise FileNotFoundError(
            f"megatron-core {version} is not in {FOLDER}; run tests/adapters/fetch_megatron.py"
        )
    return folder


def fetch(version: str) -> None:
    """Download one release, unless it is there."""
    folder, partial = FOLDER / version, FOLDER / f"{version}.partial"
    if folder.exists():
        return
    shutil.rmtree(partial, ignore_errors=True)
    newer = ["--python-version", "3.12", "--ignore-requires-python"]
    print(f"megatron-core {version}", flush=True)
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        + ["--no-deps", "--only-binary=:all:", "--target", str(partial)]
        + [*(newer if version in NEEDS_PYTHON_312 else ()), f"megatron-core=={version}"],
        check=True,
    )
    partial.rename(folder)


if __name__ == "__main__":
    for version in sys.argv[1:] or VERSIONS:
        fetch(version)
