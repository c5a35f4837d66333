"""Upper limits of the kernels that models launch, counted by `npu-ops launches`."""

import json
import pathlib
import subprocess
import sys

import pytest
from npu_ops_tools import launches
from support import often
from transformers import OlmoHybridConfig, Qwen3_5TextConfig, Qwen3Config, Qwen4ExpTextConfig
from typer.testing import CliRunner

SIZES = {
    "vocab_size": 64, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
}  # fmt: skip
LINEAR = {
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}  # fmt: skip
SPARSE = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 64, "indexer_budget": 8,
    "indexer_compress_ratio": 2, "hc_count": 2, "hc_lowrank": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25,
                        "mrope_section": [6, 5, 5], "mrope_interleaved": True},
}  # fmt: skip
CONFIGURATIONS = {
    "olmo_hybrid": OlmoHybridConfig(
        **SIZES,
        **LINEAR,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        pad_token_id=0,
        eos_token_id=63,
        architectures=["OlmoHybridForCausalLM"],
    ),
    "qwen4_exp": Qwen4ExpTextConfig(
        **SIZES, **LINEAR, **EXPERTS, **SPARSE, architectures=["Qwen4ExpForCausalLM"]
    ),
    "qwen3_5": Qwen3_5TextConfig(**SIZES, **LINEAR, architectures=["Qwen3_5ForCausalLM"]),
    "qwen3": Qwen3Config(**SIZES),
}
# Most launches per layer, and in a whole step. Qwen4-Exp's indexer runs token by token.
MOST = {
    "olmo_hybrid": {
        "training, forward": ([33, 21], 76), "training, backward": ([], 121),
        "prefill": ([37, 23], 73), "decoding": ([22, 20], 57),
    },
    "qwen4_exp": {"training, backward": ([], 361), "decoding": ([90, 130], 260)},
    "qwen3_5": {
        "training, forward": ([29, 22], 80), "training, backward": ([], 115),
        "prefill": ([33, 24], 77), "decoding": ([18, 21], 61),
    },
    "qwen3": {
        "training, forward": ([19], 43), "training, backward": ([], 49), "prefill": ([21], 36),
        "decoding": ([18], 35),
    },
}  # fmt: skip


TOKENS = {"qwen4_exp": "16"}
SHARE = {"qwen4_exp": 0.75}  # upper limit of launches, relative to those without npu-ops


def launched(folder, tokens: str = "128") -> dict:
    """Return the command's output: "with npu-ops" or "without" -> step -> its counts."""
    from npu_ops_tools.cli import app

    done = CliRunner().invoke(app, ["launches", str(folder), "--tokens", tokens, "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    return {way: {step["name"]: step for step in steps} for way, steps in said.items()}


@pytest.mark.parametrize("model", often(MOST, ("qwen3_5",)))  # half a minute each
def test_a_model_launches_so_many_kernels_at_most(model, tmp_path):
    """Checks one layer of each kind, and that there are far fewer launches than without npu-ops."""
    CONFIGURATIONS[model].save_pretrained(tmp_path)
    said, share = launched(tmp_path, TOKENS.get(model, "128")), SHARE.get(model, 0.6)
    ours, theirs = said["with npu-ops"], said["without"]
    for step, (layers, total) in MOST[model].items():
        found = list(ours[step]["layers"].values())
        assert len(found) == len(layers), step
        assert all(n <= most for n, most in zip(found, layers, strict=True)), (step, found)
        assert ours[step]["total"] <= total < share * theirs[step]["total"], (step, ours[step])
        assert ours[step]["total"] == sum(ours[step]["operators"].values())
    assert ours["decoding"]["operators"]["_rms_norm_kernel"] >= 5


def test_packed_sequences_are_found_by_one_kernel():
    """Three sequences, as in training. Earlier versions launched 24 kernels (backward: 30)."""
    script = pathlib.Path(__file__).parent / "inside" / "packed_launches.py"
    command = [sys.executable, "-m", "npu_ops_emulator", "--", sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["forward"] <= 6 and said["backward"] <= 12, said


def test_with_npu_ops_is_without_what_is_disabled(tmp_path, monkeypatch):
    disabled = []

    def call(line, env):
        disabled.append(env["NPU_OPS_DISABLE"])
        pathlib.Path(line[-1]).write_text("[]")

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setenv("NPU_OPS_DISABLE", "swiglu")
    monkeypatch.setattr(launches.subprocess, "call", call)
    assert launches.both(str(tmp_path), 8) == {"without": [], "with npu-ops": []}
    assert disabled == ["all", "swiglu"]


def test_a_folder_without_a_configuration_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="model: got '.*', needs a folder with a config.json"):
        launches.both(str(tmp_path), 8)
