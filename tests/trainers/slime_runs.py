"""Starts slime_train.py, on the emulated NPU or on the CPU, and reads what it wrote."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Mapping

import fetch_frameworks
import fetch_slime
import fetch_verl
import verl_grpo_runs
import verl_runs

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
COMMON = (
    "--hidden-size", "64", "--ffn-hidden-size", "128",
    "--num-attention-heads", "4", "--group-query-attention", "--num-query-groups", "2",
    "--kv-channels", "32", "--swiglu", "--use-rotary-position-embeddings", "--disable-bias-linear",
    "--normalization", "RMSNorm", "--norm-epsilon", "1e-6", "--rotary-base", "10000",
    "--vocab-size", "512", "--qk-layernorm", "--untie-embeddings-and-output-weights",
    "--make-vocab-size-divisible-by", "128", "--no-gradient-accumulation-fusion",
)  # fmt: skip
MODELS = {
    "qwen3": ("--num-layers", "2"),
    "qwen3_next": (
        "--num-layers", "4", "--spec", "slime_plugins.models.qwen3_next", "get_qwen3_next_spec",
        "--attention-output-gate", "--rotary-percent", "0.25",
    ),
    "qwen3_vl": ("--num-layers", "2"),
    "qwen3_moe": (
        "--num-layers", "2", "--num-experts", "4", "--moe-router-topk", "2",
        "--moe-ffn-hidden-size", "48", "--moe-layer-freq", "[1,1]",
        "--moe-router-score-function", "softmax", "--moe-router-dtype", "fp32",
        "--moe-token-dispatcher-type", "alltoall", "--moe-token-drop-policy", "probs",
        "--moe-aux-loss-coeff", "0",
    ),
}  # fmt: skip
TRAINING = (  # 2 rollouts of 8 answers, 2 steps of 4 answers in each, micro-batches of 2
    "--num-rollout", "2", "--rollout-batch-size", "2", "--n-samples-per-prompt", "4",
    "--global-batch-size", "4", "--micro-batch-size", "2", "--data-pad-size-multiplier", "16",
    "--advantage-estimator", "grpo", "--use-kl-loss", "--kl-loss-coef", "0.01",
    "--lr", "1e-3", "--lr-decay-style", "constant", "--adam-beta2", "0.98",
    "--attention-dropout", "0.0", "--hidden-dropout", "0.0",
    "--accumulate-allreduce-grads-in-fp32", "--attention-softmax-in-fp32",
)  # fmt: skip
NO_ENGINE = (
    "--disable-rollout-global-dataset", "--rollout-num-gpus", "1",
    "--rollout-function-path", "slime_doubles.roll_out",
    "--custom-megatron-before-train-step-hook-path", "slime_worker.before_step",
    "--sglang-router-ip", "127.0.0.1", "--sglang-router-port", "1",
)  # fmt: skip
# Megatron-Bridge 0.3.1 takes one sequence at a time where there are pictures, and no padding.
PICTURES = {"qwen3_vl": ("--micro-batch-size", "1", "--data-pad-size-multiplier", "1")}
SEES = "transformers-4.57.6"  # of another, Megatron-Bridge 0.3.1 does not take the vision tower
# Megatron's own modules, which need no Transformer Engine.
LOCAL = (
    "--transformer-impl", "local", "--no-rope-fusion", "--no-persist-layer-norm",
    "--no-masked-softmax-fusion",
)  # fmt: skip
ON_NPU = ("--custom-megatron-init-path", "slime_worker.count_fused")
# With these, the arguments of slime's scripts, but for --moe-permute-fusion.
AS_SCRIPTS = {
    "qwen3_moe": ("--moe-grouped-gemm",),
    "qwen3_vl": (
        "--megatron-to-hf-mode", "bridge", "--recompute-granularity", "full",
        "--recompute-method", "uniform", "--recompute-num-layers", "1",
    ),
}  # fmt: skip
ON_CPU = ("--custom-megatron-init-path", "slime_worker.with_local_layers")
PROVIDERS = {"qwen3_vl": ("--custom-model-provider-path", "slime_qwen3_vl.provide")}
# slime's patches import mbridge first, after which Megatron has no layers for these models.
MINDSPEED_FIRST = ("qwen3_next", "qwen3_moe")
# Megatron asks for it where tensors are parallel.
ONCE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} | verl_grpo_runs.RAY
ONCE["RAY_prestart_worker_first_driver"] = "0"  # each imports all of it, and most are not needed


@dataclasses.dataclass(frozen=True)
class Run:
    """Each step's loss, its parts and the gradient norm; the mean log-probabilities of each
    rollout; and the calls of each rank."""

    steps: tuple[Mapping[str, float], ...]
    rollouts: tuple[Mapping[str, float], ...]
    calls: tuple[Mapping[str, int], ...]


def write(folder: pathlib.Path) -> None:
    """The models, as Hugging Face's and as Megatron's checkpoints, and the rollouts."""
    read = [model for model in MODELS if model not in PICTURES]
    for models in (read, list(PICTURES)):
        data = [sys.executable, str(HERE / "slime_data.py"), str(folder), "slime", *models]
        verl_runs.finish(data, variables("truth", folder, models[0]))
    for model, settings in MODELS.items():
        command = [sys.executable, str(HERE / "slime_convert.py"), model, *COMMON, *settings]
        paths = ["--hf-checkpoint", folder / model, "--save", folder / f"{model}-megatron"]
        command += [*LOCAL, *map(str, paths), "--ckpt-format", "torch_dist"]
        verl_runs.finish(command, variables("truth", folder, model))


def run(folder: pathlib.Path, who: str, model: str = "qwen3", devices: int = 1) -> Run:
    """On the CPU for "truth"; tensors are parallel over the devices."""
    results = folder / f"{who}-{model}-{devices}"
    results.mkdir()
    paths = {"--ref-load": f"{model}-megatron", "--hf-checkpoint": model}
    rollouts = "pictures" if model in PICTURES else "rollout"
    paths |= {"--load-debug-rollout-data": f"{rollouts}_{{rollout_id}}.pt"}
    files = [part for name, file in paths.items() for part in (name, str(folder / file))]
    command = [
        sys.executable, str(HERE / "slime_train.py"), str(devices), *COMMON, *MODELS[model],
        *TRAINING, *PICTURES.get(model, ()), *NO_ENGINE, *files, "--actor-num-nodes", "1",
        *("--actor-num-gpus-per-node", str(devices), "--tensor-model-parallel-size", str(devices)),
        *(LOCAL + ON_CPU + PROVIDERS.get(model, ()) if who == "truth" else ()),
        *(ON_NPU + AS_SCRIPTS.get(model, ()) if who != "truth" else ()),
    ]  # fmt: skip
    if who != "truth":
        command = verl_runs.emulated(devices, command)
    environment = variables(who, results, model)
    if who == "shipped" and model in MINDSPEED_FIRST:
        environment["SLIME_MINDSPEED_FIRST"] = "1"
    if who != "truth" and model in PICTURES:
        environment["SLIME_WHOLE_BRIDGE"] = "1"
    verl_runs.finish(command, environment)
    return read(results, devices)


def read(results: pathlib.Path, ranks: int) -> Run:
    lines = [(results / f"{rank}.jsonl").read_text().splitlines() for rank in range(ranks)]
    entries = [[json.loads(line) for line in of_rank] for of_rank in lines]
    steps = tuple(m for m in entries[0] if "train/grad_norm" in m)
    rollouts = tuple(m for m in entries[0] if "rollout/log_probs" in m)
    calls = tuple([m["calls"] for m in of_rank if "calls" in m][-1] for of_rank in entries)
    return Run(steps, rollouts, calls)


def variables(who: str, results: pathlib.Path, model: str) -> dict[str, str]:
    """slime's sources and packages come before verl's, and those before ours."""
    projects = ("slime", "megatron", "mindspeed", "bridge")
    slime, megatron, mindspeed, bridge = (fetch_slime.tree(who, project) for project in projects)
    path = [slime, megatron, mindspeed, bridge, fetch_slime.packages(), fetch_verl.tree()]
    path += [HERE, ROOT / "tests" / "adapters"]
    if who != "truth":
        path.insert(0, fetch_frameworks.tree("fla-core-0.6.0"))
    if model in PICTURES:
        path.insert(0, fetch_frameworks.tree(SEES))
    path += [ROOT, ROOT / "python", *filter(None, [os.environ.get("PYTHONPATH")])]
    changes = {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "NPU_OPS_DISABLE": "" if who == "npu_ops" else "all",
        "SLIME_WHO": who,
        "SLIME_RESULTS": str(results),
        "SLIME_BRIDGE": str(bridge),
        "SLIME_SOURCES": os.pathsep.join(map(str, (slime, megatron))),
    }
    compiled = {"TORCH_COMPILE_DISABLE": "1"} if who == "truth" else {}  # minutes
    return os.environ | verl_runs.ALONE | ONCE | compiled | changes
