"""A build backend on top of setuptools that needs torch only if native kernels are compiled.

The list of requirements in pyproject.toml cannot depend on NPU_OPS_SKIP_NATIVE, and torch is a
download of a GB. pip and build call these hooks (PEP 517, PEP 660) in the folder of the sources.
"""

import contextlib
import os
import pathlib

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]
SKIP = "NPU_OPS_SKIP_NATIVE"
# A plain "torch" would pull the newest CUDA build into the isolated build environment.
NATIVE = ["torch==2.13.0", "ninja"]
BUILD_INFO = pathlib.Path("npu_ops", "_build_info.json")


def get_requires_for_build_wheel(config_settings=None):
    return [] if os.environ.get(SKIP) == "1" else NATIVE


get_requires_for_build_editable = get_requires_for_build_wheel


def get_requires_for_build_sdist(config_settings=None):
    return []


def build_sdist(sdist_directory, config_settings=None):
    """Build the source distribution: compile nothing, and leave the folder unchanged."""
    before = os.environ.get(SKIP)
    os.environ[SKIP] = "1"
    try:
        with kept(BUILD_INFO):
            return build_meta.build_sdist(sdist_directory, config_settings)
    finally:
        os.environ.pop(SKIP) if before is None else os.environ.update({SKIP: before})


@contextlib.contextmanager
def kept(file):
    """Restore a file that setup.py overwrites; it describes how the library beside it was built."""
    before = file.read_bytes() if file.exists() else None
    try:
        yield
    finally:
        file.unlink(missing_ok=True) if before is None else file.write_bytes(before)
