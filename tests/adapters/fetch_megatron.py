"""Download the megatron-core releases that the adapters are tested with into .cache/megatron.

python tests/adapters/fetch_megatron.py [VERSION...]
"""

from __future__ import annotations

import pathlib
import sys

import fetching

FOLDER = fetching.CACHE / "megatron"
VERSIONS = ("0.12.3", "0.13.1", "0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2")
# Published for Python 3.12 and later only, but their Python code runs on 3.10 too.
NEEDS_PYTHON_312 = ("0.17.1", "0.18.2", "0.19.2")


def tree(version: str) -> pathlib.Path:
    """Return the folder for PYTHONPATH. Raises FileNotFoundError if it was not downloaded."""
    return fetching.tree(FOLDER / version, "tests/adapters/fetch_megatron.py")


def fetch(version: str) -> None:
    """Download one release, unless its folder exists."""
    newer = ("--python-version", "3.12", "--ignore-requires-python")
    flags = newer if version in NEEDS_PYTHON_312 else ()
    fetching.install(FOLDER / version, *flags, f"megatron-core=={version}")


if __name__ == "__main__":
    for version in sys.argv[1:] or VERSIONS:
        fetch(version)
