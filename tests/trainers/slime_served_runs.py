"""Runs slime's train.py with SGLang's engine as rollout, on two emulated NPUs; reads the results.

The engine is SGLang 0.5.23's on its own platform for NPUs. Router and server are started by slime.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess

import fetch_slime
import slime_newest_runs
import slime_runs
import verl_grpo_runs
import verl_runs

ENGINE = (
    "--input-key", "text", "--rm-type", "random",
    "--rollout-max-response-len", "12", "--rollout-temperature", "1",
    "--sglang-device", "npu",
    "--sglang-attention-backend", "ascend", "--sglang-sampling-backend", "ascend",
    "--sglang-grammar-backend", "none", "--sglang-page-size", "128",
    "--sglang-chunked-prefill-size", "128", "--sglang-max-total-tokens", "2048",
    "--sglang-max-running-requests", "8", "--sglang-mem-fraction-static", "0.3",
    "--sglang-disable-radix-cache", "--sglang-disable-overlap-schedule",
    "--sglang-disable-cuda-graph",
)  # fmt: skip
DTYPES = {"float32": "fp32", "bfloat16": "bf16"}


def write(folder: pathlib.Path) -> None:
    slime_newest_runs.write_text(folder)
    lines = [json.dumps({"text": prompt}) for prompt in slime_runs.PROMPTS]
    (folder / "prompts.jsonl").write_text("\n".join(lines))


def run(folder: pathlib.Path, name: str, dtype: str, consistent: bool, *more: str):
    results = folder / f"served-{name}-{dtype}-{int(consistent)}"
    results.mkdir()
    model, theirs = slime_newest_runs.MODELS[name], str(folder / name)
    command = [
        *slime_newest_runs.program("npu_ops", 2), *slime_newest_runs.COMMON,
        *slime_runs.TRAINING, *ENGINE, *model.layers,
        "--ref-load", theirs, "--hf-checkpoint", theirs,
        "--prompt-data", str(folder / "prompts.jsonl"),
        "--sglang-dtype", dtype,
        "--actor-num-nodes", "1", "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1",
        *model.script, *more,
    ]  # fmt: skip
    environment = slime_newest_runs.variables("npu_ops", results)
    environment |= beside_sglang(results / "triton", environment["PYTHONPATH"])
    environment |= {"SLIME_DTYPE": dtype}
    if consistent:
        environment["NPU_OPS_CONSISTENT"] = "1"
    log = open(results / "log", "w")
    done = subprocess.run(verl_runs.emulated(2, command), env=environment, stdout=log, stderr=log)
    return done.returncode, results


def beside_sglang(folder: pathlib.Path, path: str) -> dict[str, str]:
    path = os.pathsep.join([path, str(fetch_slime.router())])
    return verl_grpo_runs.beside_sglang(folder, path) | {
        "SGLANG_NPU_DISABLE_ACL_FORMAT_WEIGHT": "1",  # the emulator converts no formats
        "SLIME_ENGINE": "1",
        "SLIME_HOST_IP": "127.0.0.1",
    }
