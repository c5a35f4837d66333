"""Runs the checks of one megatron-core release in a process of its own, two at a time."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import fetch_megatron
import pytest

HERE = pathlib.Path(__file__).parent


def environment(*folders, **changes) -> dict[str, str]:
    """This process's environment, with `folders` first on PYTHONPATH."""
    before = os.environ.get("PYTHONPATH")
    path = [*map(str, folders), *([before] if before else [])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)} | changes


def run_checks(version: str, mode: str) -> dict[str, str | None]:
    """What went wrong in each check, or None."""
    autoload = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1" if mode == "early" else "0"}
    done = subprocess.run(
        [sys.executable, "-c", f"import megatron_checks; megatron_checks.run({mode!r})"],
        env=environment(HERE, HERE / "doubles", fetch_megatron.tree(version), **autoload),
        capture_output=True,
        text=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    stopped = f"not reached: the process ended with {done.returncode}\n{done.stderr[-3000:]}"
    return {"stopped": stopped} | dict(lines)


@pytest.fixture(scope="session")
def megatron_reports(request):
    """{(version, mode): future of `run_checks`} for the tests that were selected."""
    wanted = dict.fromkeys(
        (item.callspec.params["version"], item.callspec.params["mode"])
        for item in request.session.items
        if "megatron_reports" in getattr(item, "fixturenames", ())
    )
    with ThreadPoolExecutor(2) as pool:
        yield {run: pool.submit(run_checks, *run) for run in wanted}
