"""Test npu-ops's patches over those of a stand-in for MindSpeed, with a real megatron-core.

The checks are in `mindspeed_checks.py`; `upstream_mindspeed.py` runs them on MindSpeed's sources.
"""

import functools
import json
import pathlib
import subprocess
import sys
import types

import fetch_megatron
import mindspeed_checks
import pytest
from npu_ops_adapters.mindspeed import attention, expert_checkpoint
from processes import environment

HERE = pathlib.Path(__file__).parent
BRANCHES = {"core_r0.12": "0.12.3", "core_r0.16": "0.16.1", "core_r0.18": "0.18.2"}
# The order of imports only concerns code that all branches share, so the branch that is imported
# fastest is enough for the other orders.
SELDOM = {(b, o) for b in ("core_r0.16", "core_r0.18") for o in ("late", "megatron first")}
RUNS = [
    pytest.param(
        branch, order,
        marks=[
            pytest.mark.xdist_group(f"mindspeed-{branch}-{order}"),
            *[pytest.mark.slow] * ((branch, order) in SELDOM),
        ],
    )
    for branch in BRANCHES
    for order in mindspeed_checks.ORDERS
]  # fmt: skip


@functools.cache
def run(branch: str, order: str) -> dict[str, str | None]:
    """Return the error of each check, None if it passed."""
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


def test_checkpoints_of_experts_say_how_experts_are_parallel(monkeypatch):
    def make(
        state_dict, prefix, tensor_parallel_layers_axis_map=None, sharded_offsets=(),
        extra_state_suffix="", tp_group=None, dp_cp_group=None,
    ):  # fmt: skip
        return tp_group, dp_cp_group

    state = types.SimpleNamespace(
        get_expert_tensor_parallel_group=lambda: "experts'",
        get_data_parallel_group=lambda with_context_parallel: "all",
    )
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    source = "make_sharded_tensors_for_checkpoint(state{})\nother(tp_group=1)"
    for passes, more in ((False, ""), (True, ", tp_group=1")):
        module = types.ModuleType("grouped_linear")
        text = source.format(more)
        monkeypatch.setattr("inspect.getsource", lambda module, text=text: text)
        assert expert_checkpoint._passes_no_group(module) is not passes
    ours = expert_checkpoint._with_groups(make)
    assert ours({}, "", {}) == ("experts'", "all")
    assert ours({}, "", {}, tp_group=1, dp_cp_group=2) == ours({}, "", {}, (), "", 1, 2) == (1, 2)


def test_mindspeeds_engine_is_not_passed_fields_it_does_not_have():
    """A later Megatron's PackedSeqParams has more fields.

    npu-ops drops those that are None or count tokens. Other values are still errors.
    """

    def forward(self, query, cu_seqlens_q=None):
        return query, cu_seqlens_q

    ours = attention._replace_engine(forward)
    fields = {"cu_seqlens_q": 2, "local_cp_size": None, "cp_group": None, "total_tokens": 7}
    assert ours(None, 1, **fields) == (1, 2)
    with pytest.raises(TypeError, match="local_cp_size"):
        ours(None, 1, local_cp_size=2)


@pytest.mark.parametrize("check", [check.__name__ for check in mindspeed_checks.CHECKS])
@pytest.mark.parametrize("branch, order", RUNS)
def test_mindspeed(branch, order, check):
    report = run(branch, order)
    error = report.get(check, report["stopped"])
    assert error is None, f"{branch}, {order}:\n{error}"
