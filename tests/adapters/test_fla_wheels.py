"""Test npu-ops in real releases of fla; on the CPU its results must be those of fla's
naive functions."""

import json
import pathlib
import subprocess
import sys

import fetch_frameworks
import pytest
from processes import environment, run_ranks

HERE = pathlib.Path(__file__).parent


@pytest.mark.parametrize("release", ["fla-core-0.5.2", "fla-core-0.6.0"])
def test_a_release_computes_by_npu_ops_what_its_naive_functions_do(release):
    done = subprocess.run(
        [sys.executable, HERE / "fla_process.py", fetch_frameworks.tree(release)],
        env=environment(HERE),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    calls, errors, states, reverted = json.loads(done.stdout.splitlines()[-1])
    assert calls == {"chunk_gated_delta_rule": 3, "fused_recurrent_gated_delta_rule": 1}
    assert len(errors) == 48 and max(errors.values()) < 2e-6, errors
    states = {target: state for target, state in states.items() if target.startswith("fla.")}
    assert len(states) >= 8 and set(states.values()) == {"applied"}
    assert {reverted[target] for target in states} == {"reverted"}


@pytest.mark.parametrize(
    "release, ranks",
    [pytest.param("fla-core-0.5.2", 2, marks=pytest.mark.slow), ("fla-core-0.6.0", 3)],
)
def test_ranks_share_packed_sequences_by_fla_s_context(release, ranks, tmp_path):
    tree = fetch_frameworks.tree(release)
    for found in run_ranks("fla_ranks.py", tmp_path / "store", ranks, tree):
        for name, errors in found.items():
            assert errors.pop("calls") == 1, name
            assert max(errors.values()) < 1e-5, (name, errors)
