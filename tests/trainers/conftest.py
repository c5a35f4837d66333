"""Trainers as their users start them: processes of torchrun, whose results are files."""

from __future__ import annotations

import functools
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "adapters"))


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """What `runs` of a test's module has written, for each of its runs."""
    folder = tmp_path_factory.mktemp("runs")
    request.module.runs.write(folder)
    return folder


@pytest.fixture(scope="module")
def truth(request, folder):
    """Of a model, on the CPU, one rank."""
    return functools.cache(functools.partial(request.module.runs.run, folder, "truth"))
