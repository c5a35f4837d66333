"""Runs slime's train.py with SGLang's engine as rollout on emulated NPUs, and reads the results.

slime itself starts SGLang's router and server. The server is SGLang 0.5.23's, on its own platform
for NPUs.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys

import fetch_slime
import slime_newest_runs
import slime_runs
import verl_grpo_runs
import verl_runs

MODELS = "qwen3", "qwen3_5"
# slime's metric per step: the mean difference of the trainer's log-probabilities from the engine's.
APART = "train/train_rollout_logprob_abs_diff"
# The settings of tests/adapters/sglang_cpu/engine.py.
ENGINE = (
    "--input-key", "text", "--apply-chat-template", "--custom-rm-path", "slime_engine.reward",
    "--rollout-max-response-len", "12",
    "--sglang-device", "npu",
    "--sglang-attention-backend", "ascend", "--sglang-sampling-backend", "ascend",
    "--sglang-grammar-backend", "none", "--sglang-page-size", "128",
    "--sglang-chunked-prefill-size", "128", "--sglang-max-total-tokens", "2048",
    "--sglang-max-running-requests", "8", "--sglang-mem-fraction-static", "0.3",
    "--sglang-disable-radix-cache", "--sglang-disable-overlap-schedule",
    "--sglang-disable-cuda-graph",
)  # fmt: skip
# The engine and the trainer share a device.
COLOCATED = (
    "--colocate", "--no-offload-train", "--no-offload-rollout", "--num-gpus-per-node", "1",
    "--update-weight-transport", "disk",
)  # fmt: skip


def write(folder: pathlib.Path) -> None:
    """Write the models in Hugging Face's form, and the prompts."""
    data = [sys.executable, str(slime_runs.HERE / "slime_data.py"), str(folder), "slime"]
    verl_runs.finish([*data, "rollout", *MODELS], slime_newest_runs.variables("truth", folder))
    slime_runs.write_prompts(folder)
    same_rope(folder / "qwen3_5" / "config.json")


def same_rope(file: pathlib.Path) -> None:
    """Write partial_rotary_factor in two places: one for SGLang, one for transformers and slime."""
    config = json.loads(file.read_text())
    text = config["text_config"]
    text["partial_rotary_factor"] = text["rope_parameters"]["partial_rotary_factor"]
    file.write_text(json.dumps(config))


def run(
    folder: pathlib.Path, name: str, dtype: str, consistent: bool, colocated: bool = False
) -> tuple[slime_runs.Run, str]:
    """Train; return the results and the stem of the rollout files, for slime_newest_runs.run."""
    kind = f"{name}-{dtype}{'-consistent' * consistent}{'-colocated' * colocated}"
    results = folder / f"served-{kind}"
    results.mkdir()
    model, theirs = slime_newest_runs.MODELS[name], str(folder / name)
    devices = 1 if colocated else 2
    command = [
        *slime_newest_runs.program("npu_ops", devices), *slime_newest_runs.COMMON,
        *slime_runs.TRAINING, *ENGINE, *model.layers, *model.script,
        "--ref-load", theirs, "--hf-checkpoint", theirs, "--sglang-dtype", dtype,
        "--prompt-data", str(folder / "prompts.jsonl"),
        "--save-debug-rollout-data", str(folder / f"{kind}_{{rollout_id}}.pt"),
        "--actor-num-nodes", "1", "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1",
        *(COLOCATED if colocated else ()),
        *(("--update-weight-disk-dir", str(results / "weights")) if colocated else ()),
    ]  # fmt: skip
    verl_runs.finish(verl_runs.emulated(devices, command), variables(results, dtype, consistent))
    return slime_runs.read(results, 1), kind


def variables(results: pathlib.Path, dtype: str, consistent: bool) -> dict[str, str]:
    """Return slime's environment, with SGLang's packages at the end of PYTHONPATH."""
    ours = slime_newest_runs.variables("npu_ops", results)
    path = os.pathsep.join([ours["PYTHONPATH"], str(fetch_slime.router())])
    changes = verl_grpo_runs.beside_sglang(results / "triton", path) | {
        "SGLANG_NPU_DISABLE_ACL_FORMAT_WEIGHT": "1",  # the emulator has no vendor formats
        "SLIME_DTYPE": dtype,
        "SLIME_ENGINE": "1",
        "SLIME_HOST_IP": "127.0.0.1",
        "TORCH_NPU_DEVICE_CAPABILITY": "0.0",  # torch 2.13 queries it at each broadcast
    }
    if consistent:
        changes["NPU_OPS_CONSISTENT"] = "1"
    return ours | changes
