"""SGLang's engine, its own kit and its hooks on npu-ops, in processes: see sglang_cpu/."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys

import pytest
import sglang_process
from sglang_cpu.checks import CHECKS

HOOKS = re.compile(r"npu-ops in SGLang: (\d+) of (\d+) hooks in force")
TEXT = {"qk_norm_rope", "attention"}
TOWER = {"rope"}
GATED_DELTA_NET = {
    *("causal_conv1d", "causal_conv1d_update", "gdn_gate", "rms_norm_gated"),
    *("chunk_gated_delta_rule", "gated_delta_rule_update"),
}
OPS = {
    "qwen3": TEXT,
    "qwen3next": TEXT | GATED_DELTA_NET,
    "qwen3vl": TEXT | TOWER,
    "qwen3_5": TEXT | TOWER | GATED_DELTA_NET,
}
MORE = {name: ["mm_attention_backend=ascend_attn"] for name in ("qwen3vl", "qwen3_5")}
_SELDOM = ("qwen3", "qwen3_5")


def once(tmp_path_factory, name: str, make):
    """What `make(folder)` returned, as JSON, in whichever test process came first."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    folder = shared / f"sglang-{name}"
    with open(shared / f"sglang-{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder / "returned.json"
        if not done.exists():
            folder.mkdir()
            done.write_text(json.dumps(make(folder)))
    return folder, json.loads(done.read_text())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    def make(folder):  # transformers' own functions, not ours in their place
        return sglang_process.run("tiny", folder, NPU_OPS_DISABLE="all")[0]

    return once(tmp_path_factory, "tiny", make)[0]


def expected(folder) -> dict:
    prompts = json.loads((folder / "expected.json").read_text())
    return {prompt: following for prompt, (_, following) in prompts.items()}


@pytest.mark.parametrize(
    "model",
    ["qwen3next", "qwen3vl", *(pytest.param(m, marks=pytest.mark.slow) for m in _SELDOM)],
)
def test_the_engine_generates_what_transformers_does_by_our_operators(tiny, model):
    arguments = (tiny / model, *MORE.get(model, ()))
    rows, said = sglang_process.run("engine", *arguments, NPU_OPS_LOG="calls", TRITON_INTERPRET="1")
    assert dict(rows) == expected(tiny / model)
    calls = sglang_process.calls(said)
    assert {op for op, _ in calls} == OPS[model], calls
    assert {implementation for _, implementation in calls} == {"cpu"}, calls
    (found,) = set(HOOKS.findall(said))
    assert found[0] == found[1] and int(found[0]) >= 14, found
    assert "SGLang's own" not in said  # nothing fell back


ON_NPU = OPS


@pytest.mark.slow
@pytest.mark.parametrize("model", ON_NPU)
def test_sglangs_own_platform_for_npus_on_the_emulated_one(tiny, tmp_path, model):
    """Our kernels compiled by the vendor's compiler, and torch_npu's operators, emulated."""
    settings = {"NPU_OPS_LOG": "calls", "ASCEND_USE_FIA": "0" if model == "qwen3" else "1"}
    rows, said = sglang_process.run(
        "engine", tiny / model, **sglang_process.on_npu(tmp_path) | settings
    )
    assert dict(rows) == expected(tiny / model)
    calls = sglang_process.calls(said)
    assert {op for op, _ in calls} == ON_NPU[model], calls
    assert {implementation for _, implementation in calls} <= {"triton_ascend", "aclnn"}, calls
    assert "is not in force" not in said and "SGLang's own" not in said


@pytest.mark.slow
def test_disabled_the_engine_runs_its_own(tiny):
    changes = {"NPU_OPS_LOG": "calls", "NPU_OPS_DISABLE": "rope,qk_norm_rope"}
    rows, said = sglang_process.run("engine", tiny / "qwen3", **changes)
    assert {op for op, _ in sglang_process.calls(said)} == {"attention"}
    assert dict(rows) == expected(tiny / "qwen3")


@pytest.fixture(scope="module", params=[function.__name__ for function in CHECKS])
def checked(request, tmp_path_factory):
    """A check's name, and what went wrong."""
    _, rows = once(tmp_path_factory, "checks", lambda _: sglang_process.run("checks")[0])
    return request.param, dict(rows)[request.param]


def test_a_hook(checked):
    name, error = checked
    assert error is None, f"{name}:\n{error}"


def test_sglangs_own_kit_of_gated_delta_net():
    rows, _ = sglang_process.run("gdn_kit")
    assert len(rows) == 10
    assert [f"{name}:\n{error}" for name, error in rows if error] == []


def test_the_backends_for_npus_on_cpu_tensors():
    checked, _ = sglang_process.run("ascend")
    assert len(checked) == 17
    assert [f"{name}:\n{error}" for name, error in checked if error] == []


@pytest.mark.slow
def test_doctor_names_each_hook_and_its_state():
    done = subprocess.run(
        [sys.executable, "-m", "npu_ops_tools", "doctor", "--json"],
        env=sglang_process.environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout[done.stdout.index("{") :])
    rows = [row for row in found["patches"] if row["target"].startswith("sglang.")]
    assert {row["state"] for row in rows} == {"applied"}, rows
    assert {"rope", "mrope", "gated_delta_net", "attention"} <= {row["op"] for row in rows}
