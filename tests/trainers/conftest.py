"""Fixtures of the trainers' tests, which start trainers in other processes, as users do.

A run's results are read from files.
"""

from __future__ import annotations

import functools
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "adapters"))


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """Return a folder with models and data. The `runs` of the test's module writes them."""
    folder = tmp_path_factory.mktemp("runs")
    request.module.runs.write(folder)
    return folder


@pytest.fixture(scope="module")
def truth(request, folder):
    """Return a function from a model to the reference: its run on the CPU with one rank."""
    return functools.cache(functools.partial(request.module.runs.run, folder, "truth"))
