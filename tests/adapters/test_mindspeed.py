"""The layer over MindSpeed, on a double of it and a real megatron-core: see mindspeed_checks.py.

`upstream_mindspeed.py` runs the same checks on MindSpeed's own sources.
"""

import json
import pathlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import fetch_megatron
import mindspeed_checks
import pytest
from conftest import environment

HERE = pathlib.Path(__file__).parent
BRANCHES = {"core_r0.12": "0.12.3", "core_r0.16": "0.16.1", "core_r0.18": "0.18.2"}
RUNS = [(branch, order) for branch in BRANCHES for order in mindspeed_checks.ORDERS]


def run(branch: str, order: str) -> dict[str, str | None]:
    """What went wrong in each check, or None."""
    folders = (HERE, HERE / "doubles", fetch_megatron.tree(BRANCHES[branch]))
    early = "0" if order == "late" else "1"
    done = subprocess.run(
        [sys.executable, "-c", f"import torch, mindspeed_checks as m; m.run({order!r})"],
        env=environment(*folders, MINDSPEED_DOUBLE=branch, TORCH_DEVICE_BACKEND_AUTOLOAD=early),
        capture_output=True,
        text=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    return {"stopped": f"the process ended with {done.returncode}\n{done.stderr}"} | dict(lines)


@pytest.fixture(scope="module")
def reports():
    with ThreadPoolExecutor(2) as pool:
        yield {key: pool.submit(run, *key) for key in RUNS}


@pytest.mark.parametrize("check", [check.__name__ for check in mindspeed_checks.CHECKS])
@pytest.mark.parametrize("branch, order", RUNS)
def test_mindspeed(reports, branch, order, check):
    report = reports[branch, order].result()
    error = report.get(check, report["stopped"])
    assert error is None, f"{branch}, {order}:\n{error}"
