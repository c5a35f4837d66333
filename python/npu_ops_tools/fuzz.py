"""Loads the fuzzer from tests/fuzz of the repository, which is not part of an installed package."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

from npu_ops_tools import where


def load() -> ModuleType:
    """Return the fuzzer's module `fuzz.run`.

    Raises:
        FileNotFoundError: there is no clone.
        ImportError: hypothesis, which draws the cases, is not installed.
    """
    tests = where.clone() / "tests"
    if importlib.util.find_spec("hypothesis") is None:
        raise ImportError("hypothesis is not installed; pip install hypothesis")
    if str(tests) not in sys.path:
        sys.path.insert(0, str(tests))
    return importlib.import_module("fuzz.run")
