"""Test SGLang's engine, test kit and hooks with npu-ops, in other processes; see sglang_cpu/."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import sglang_process
from checkpoints import in_dtype
from sglang_cpu.checks import CHECKS
from sglang_cpu.engine import ON_NPU, SETTINGS
from sglang_cpu.tiny import PICTURED

pytestmark = pytest.mark.xdist_group("sglang")  # shares the models and a process of checks
HOOKS = re.compile(r"npu-ops in SGLang: (\d+) of (\d+) hooks in force")
TEXT = {"qk_norm_rope", "attention", "rms_norm", "add_rms_norm"}
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
    # Qwen4-Exp normalises streams, not sums, and its indexer calls mrope.
    "qwen4exp": TEXT - {"add_rms_norm"} | {"mrope"} | TOWER | GATED_DELTA_NET,
}
MORE = {name: ["mm_attention_backend=ascend_attn"] for name in ("qwen3vl", "qwen3_5", "qwen4exp")}
MORE["qwen4exp"] += ["dtype=bfloat16"]  # SGLang has some of its weights only in this dtype
# torch.compile is off for Qwen4-Exp: it takes a minute, and the compiled code rounds differently.
SETTINGS_OF = {"qwen4exp": {"TORCHDYNAMO_DISABLE": "1", "SGLANG_MAMBA_CONV_DTYPE": "bfloat16"}}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder of models, made with transformers unpatched."""
    folder = tmp_path_factory.mktemp("tiny")
    sglang_process.run("tiny", folder, NPU_OPS_DISABLE="all")
    return folder


def expected(folder) -> dict:
    prompts = json.loads((folder / "expected.json").read_text())
    return {prompt: following for prompt, (_, following) in prompts.items()}


def serve(tiny, *models: str, more=(), **settings):
    """Yield, for each model, its name, the tokens after each prompt, and its output.

    more: settings of the engine, "name=value", beyond those of `sglang_cpu.engine`.
    """
    arguments = [argument for m in models for argument in (tiny / m, *MORE.get(m, ()), *more)]
    rows, said = sglang_process.run("engine", *arguments, NPU_OPS_LOG="calls", **settings)
    parts = re.split(r"^model: (\w+)$", said, flags=re.M)
    for model, part in zip(parts[1::2], parts[2::2], strict=True):
        yield model, {prompt: tokens for m, prompt, tokens in rows if m == model}, part


@pytest.mark.parametrize(
    "models",
    [
        ("qwen3",),
        pytest.param(("qwen3next", "qwen3_5", "qwen3vl"), marks=pytest.mark.slow),
        pytest.param(("qwen4exp",), marks=pytest.mark.slow),
    ],
)
def test_the_engine_generates_what_transformers_does_by_our_operators(tiny, models):
    served = list(serve(tiny, *models, TRITON_INTERPRET="1", **SETTINGS_OF.get(models[0], {})))
    assert [model for model, *_ in served] == list(models)
    for model, tokens, said in served:
        assert tokens == expected(tiny / model)
        calls = sglang_process.calls(said)
        assert {op for op, _ in calls} == OPS[model], calls
        assert {implementation for _, implementation in calls} == {"cpu"}, calls
        (found,) = set(HOOKS.findall(said))
        assert found[0] == found[1] and int(found[0]) >= 14, found
        assert "SGLang's own" not in said  # no fallback


@pytest.mark.slow
@pytest.mark.parametrize("model", OPS)
def test_sglangs_own_platform_for_npus_on_the_emulated_one(tiny, tmp_path, model):
    """Runs our kernels, compiled by the vendor's compiler, and torch_npu's
    operators, all emulated."""
    settings = {"ASCEND_USE_FIA": "0" if model == "qwen3" else "1"} | SETTINGS_OF.get(model, {})
    ((_, tokens, said),) = serve(tiny, model, **sglang_process.on_npu(tmp_path) | settings)
    assert tokens == expected(tiny / model)
    calls = sglang_process.calls(said)
    assert {op for op, _ in calls} == OPS[model], calls
    assert {implementation for _, implementation in calls} <= {"triton_ascend", "aclnn"}, calls
    assert "is not in force" not in said and "SGLang's own" not in said


# Decoding in graphs of two rows; the second is padding, as prompts come one at a time.
IN_GRAPHS = (
    "disable_cuda_graph=false", "decode_log_interval=1",
    'cuda_graph_config={"decode": {"backend": "full", "bs": [2]}}',
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("model", [model for model in OPS if model != "qwen4exp"])
def test_sglangs_graphs_of_decoding_on_the_emulated_npu(tiny, tmp_path, model):
    """SGLang's graph runner captures a whole step of a model, and updates lengths
    at each replay."""
    settings = sglang_process.on_npu(tmp_path) | {"TORCHDYNAMO_DISABLE": "1"}
    ((_, tokens, said),) = serve(tiny, model, more=IN_GRAPHS, **settings)
    assert tokens == expected(tiny / model)
    by_graph = re.findall(r"Decode batch.*npu graph: (\w+)", said)
    assert by_graph and set(by_graph) == {"True"}
    assert "is not in force" not in said and "SGLang's own" not in said


@pytest.mark.slow
def test_disabled_the_engine_runs_its_own(tiny):
    disabled = {"rope", "qk_norm_rope"}
    ((_, tokens, said),) = serve(tiny, "qwen3", NPU_OPS_DISABLE=",".join(disabled))
    ran = {op for op, _ in sglang_process.calls(said)}
    assert "attention" in ran and not ran & disabled
    assert tokens == expected(tiny / "qwen3")


# Number of tokens that each prompt finds in the prefix cache. On NPUs these are whole pages.
CACHED = {"cpu": [0, 0, 0, 0, 7, 70, 150, 333], "npu": [0, 0, 0, 0, 0, 0, 128, 256]}
CACHED_PICTURES = {"cpu": [0, 95], "npu": [0, 0]}
# Qwen4-Exp has pages of 64 tokens. Without state snapshots a platform caches none of its prefixes.
CACHED_QWEN4 = {"cpu": [0] * 8, "npu": [0, 0, 0, 0, 0, 64, 128, 320]}
CACHED_PICTURES_QWEN4 = {"cpu": [0, 0], "npu": [0, 64]}
UNCACHED = {"disable_radix_cache": True, "chunked_prefill_size": 64}


def rollout(model, dtype, mode, most, work=None) -> list[dict]:
    """Run `npu-ops parity --rollout` with chunked prefill and a prefix cache; return its rows.

    work: an empty folder, to run on SGLang's NPU platform and the emulated NPU.
    """
    device = "npu" if work else "cpu"
    platform = sglang_process.on_npu(work) if work else {"TRITON_INTERPRET": "1"}
    first, command = platform.pop("first", ()), platform.pop("command", (sys.executable,))
    platform |= SETTINGS_OF.get(model.name, {})
    if model.name == "qwen3":
        platform["ASCEND_USE_FIA"] = "0"
    changes = ON_NPU if work else {"chunked_prefill_size": 50}
    tower = dict(setting.split("=") for setting in MORE.get(model.name, ()))
    settings = SETTINGS | changes | tower | {"disable_radix_cache": False, "dtype": dtype}
    cached, of_pictures = CACHED[device], CACHED_PICTURES[device]
    if model.name == "qwen4exp":
        cached, of_pictures = CACHED_QWEN4[device], CACHED_PICTURES_QWEN4[device]
        settings |= {} if work else UNCACHED
    engine = [
        part for name, x in settings.items() for part in ("--engine", f"{name}={json.dumps(x)}")
    ]
    told = ["--rollout", str(model), "--dtype", dtype, "--device", device, "--tokens", "5"]
    done = subprocess.run(
        [*command, "-m", "npu_ops_tools", "parity", *told, "--json", *engine, "--most", str(most)],
        env=sglang_process.environment(
            *first, **platform | {"NPU_OPS_CONSISTENT": mode, "SGLANG_MAMBA_CONV_DTYPE": dtype}
        ),
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    rows = json.loads(done.stdout[done.stdout.index("[\n {") :])
    pictured = [row["cached"] for row in rows if row["picture"]]
    assert [row["cached"] for row in rows[:8]] == cached, rows
    assert pictured == (of_pictures if model.name in PICTURED else []), rows
    assert all(1 <= row["sampled"] <= 5 for row in rows)  # fewer than 5 if the sequence ended
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["0", "1", "chunks"])
def test_log_probabilities_of_a_rollout_are_near_a_trainers(tiny, mode):
    rollout(tiny / "qwen3next", "float32", mode, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, dtype",
    [
        ("qwen3_5", "bfloat16"),
        ("qwen3_5moe", "bfloat16"),
        ("qwen3", "float32"),
        ("qwen3next", "bfloat16"),
        ("qwen3vl", "bfloat16"),
        ("qwen4exp", "bfloat16"),
    ],
)
def test_log_probabilities_of_a_rollout_are_a_trainers_bit_for_bit(tiny, tmp_path, model, dtype):
    bit_for_bit(in_dtype(tiny / model, dtype, tmp_path), dtype)


def bit_for_bit(model, dtype, work=None) -> None:
    rows = rollout(model, dtype, "1", 0.0, work)
    assert all(row["largest"] == 0 and row["equal"] == 1 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("model", OPS)
def test_on_the_emulated_npu_they_are_too(tiny, tmp_path, model):
    """Uses SGLang's own NPU stack: its attention backend, torch_npu's operators for experts."""
    on_npu(in_dtype(tiny / model, "bfloat16", tmp_path), tmp_path / "work")


@pytest.mark.slow
def test_with_trained_norms_they_are_too(tiny, tmp_path):
    """For Qwen3.5's prompts sgl-kernel-npu's kernel gets 1 + weight, already rounded."""
    on_npu(in_dtype(tiny / "qwen3_5", "bfloat16", tmp_path, trained=True), tmp_path / "work")


def on_npu(model, work) -> None:
    work.mkdir()
    bit_for_bit(model, "bfloat16", work)


@pytest.fixture(scope="module")
def errors():
    """Return the checks of each module: names, with the error or None."""
    modules = ("checks", "gdn_kit", "ascend", "carried", "sparse")
    rows, _ = sglang_process.run("each", *modules)
    return {m: [row for module, *row in rows if module == m] for m in modules}


@pytest.mark.parametrize("name", [function.__name__ for function in CHECKS])
def test_a_hook(errors, name):
    error = dict(errors["checks"])[name]
    assert error is None, f"{name}:\n{error}"


@pytest.mark.parametrize(
    "module, count", [("gdn_kit", 10), ("ascend", 17), ("carried", 1), ("sparse", 7)]
)
def test_sglangs_own_kit_of_gated_delta_net_and_the_backends_for_npus(errors, module, count):
    assert len(errors[module]) == count
    assert [f"{name}:\n{error}" for name, error in errors[module] if error] == []


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
