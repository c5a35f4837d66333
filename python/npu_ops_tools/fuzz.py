"""The fuzzer. It is in tests/fuzz of the repository, which is no part of an installed package."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

from npu_ops_tools.where import ROOT


def load() -> ModuleType:
    """The fuzzer's module `fuzz.run`.

    Raises:
        FileNotFoundError: this is an installed package and not a clone. ImportError: hypothesis,
        which draws the cases, is not installed.
    """
    tests = ROOT / "tests"
    if not (tests / "fuzz" / "run.py").exists():
        raise FileNotFoundError(
            f"{tests / 'fuzz'} is not there; run from a clone of the repository"
        )
    if importlib.util.find_spec("hypothesis") is None:
        raise ImportError("hypothesis is not installed; pip install hypothesis")
    if str(tests) not in sys.path:
        sys.path.insert(0, str(tests))
    return importlib.import_module("fuzz.run")
