"""Starts slime v0.2.2 on the emulated NPU or on the CPU, and reads its results."""

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
# Megatron's own modules; these need no Transformer Engine.
LOCAL = (
    "--transformer-impl", "local", "--no-rope-fusion", "--no-persist-layer-norm",
    "--no-masked-softmax-fusion",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Model:
    """slime's and Megatron's arguments for a model.

    script: more arguments from slime's script for it, used with MindSpeed's layers.
    parallel: more arguments on two ranks.
    on_cpu: more arguments for reference runs on the CPU.
    data: "rollout", or "pictures" for rollouts with a picture in each answer.
    mindspeed_first: with slime's patches, import MindSpeed before mbridge. Otherwise Megatron has
    no layers for the model.
    """

    layers: tuple[str, ...]
    script: tuple[str, ...] = ()
    parallel: tuple[str, ...] = ()
    on_cpu: tuple[str, ...] = ()
    data: str = "rollout"
    mindspeed_first: bool = False

    @property
    def sees(self) -> bool:
        return self.data == "pictures"


MODELS = {
    "qwen3": Model(layers=("--num-layers", "2")),
    "qwen3_next": Model(
        layers=(
            "--num-layers", "4", "--attention-output-gate", "--rotary-percent", "0.25",
            "--spec", "slime_plugins.models.qwen3_next", "get_qwen3_next_spec",
        ),
        parallel=("--sequence-parallel",),
        mindspeed_first=True,
    ),
    "qwen3_vl": Model(
        layers=("--num-layers", "2"),
        script=(
            "--megatron-to-hf-mode", "bridge", "--recompute-granularity", "full",
            "--recompute-method", "uniform", "--recompute-num-layers", "1",
        ),
        parallel=("--sequence-parallel",),
        on_cpu=("--custom-model-provider-path", "slime_qwen3_vl.provide"),
        data="pictures",
    ),
    "qwen3_moe": Model(
        layers=(
            "--num-layers", "2", "--num-experts", "4", "--moe-router-topk", "2",
            "--moe-ffn-hidden-size", "48", "--moe-layer-freq", "[1,1]",
            "--moe-router-score-function", "softmax", "--moe-router-dtype", "fp32",
            "--moe-token-dispatcher-type", "alltoall", "--moe-token-drop-policy", "probs",
            "--moe-aux-loss-coeff", "0",
        ),
        script=("--moe-grouped-gemm",),  # the script's --moe-permute-fusion does not start
        parallel=(
            "--sequence-parallel", "--expert-model-parallel-size", "2",
            "--expert-tensor-parallel-size", "1",
        ),
        mindspeed_first=True,
    ),
}  # fmt: skip
# With pictures Megatron-Bridge 0.3.1 takes one sequence at a time, without padding.
EVEN = "pictures_even"
PICTURES = ("--micro-batch-size", "1", "--data-pad-size-multiplier", "1")
TRAINING = (  # 2 rollouts of 8 answers; 2 steps of 4 answers per rollout; micro-batches of 2
    "--num-rollout", "2", "--rollout-batch-size", "2", "--n-samples-per-prompt", "4",
    "--global-batch-size", "4", "--micro-batch-size", "2", "--data-pad-size-multiplier", "16",
    "--advantage-estimator", "grpo", "--use-kl-loss", "--kl-loss-coef", "0.01",
    "--lr", "1e-3", "--lr-decay-style", "constant", "--adam-beta2", "0.98",
    "--attention-dropout", "0.0", "--hidden-dropout", "0.0",
    "--accumulate-allreduce-grads-in-fp32", "--attention-softmax-in-fp32",
    "--custom-megatron-before-train-step-hook-path", "slime_worker.before_step",
)  # fmt: skip
NO_ENGINE = (
    "--disable-rollout-global-dataset", "--rollout-function-path", "slime_doubles.roll_out",
    "--sglang-router-ip", "127.0.0.1", "--sglang-router-port", "1",
)  # fmt: skip
# SGLang's settings, similar to tests/adapters/sglang_cpu/engine.py. SGLang starts with random
# weights ("dummy"), because slime sends it the trainer's.
ENGINE = (
    "--input-key", "text", "--custom-rm-path", "slime_engine.reward",
    "--rollout-max-response-len", "12",
    "--sglang-device", "npu", "--sglang-dtype", "float16", "--sglang-load-format", "dummy",
    "--sglang-attention-backend", "ascend", "--sglang-sampling-backend", "ascend",
    "--sglang-grammar-backend", "none", "--sglang-page-size", "128",
    "--sglang-chunked-prefill-size", "128", "--sglang-max-total-tokens", "2048",
    "--sglang-max-running-requests", "8", "--sglang-mem-fraction-static", "0.3",
    "--sglang-disable-radix-cache", "--sglang-disable-overlap-schedule",
    "--sglang-disable-cuda-graph",
)  # fmt: skip
PROMPTS = ("what is two plus three?", "the quick brown fox", "0 1 2 3 4", "think")
# First parts of SGLang's argument names in slime 0.2.2 (`..._parallel_size`); SGLang renamed them.
SIZES = ("data", "pipeline", "expert")
SEES = "transformers-4.57.6"  # Megatron-Bridge 0.3.1 accepts only this version's vision tower
ON_NPU = ("--custom-megatron-init-path", "slime_worker.count_fused")
ON_CPU = ("--custom-megatron-init-path", "slime_worker.with_local_layers")
# Megatron requires this value with tensor parallelism.
ONCE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} | verl_grpo_runs.RAY
ONCE["RAY_prestart_worker_first_driver"] = "0"  # few workers are needed; each imports everything
# transformers' lazy modules warn when MindSpeed looks up names in them
ONCE["TRANSFORMERS_VERBOSITY"] = "error"


@dataclasses.dataclass(frozen=True)
class Run:
    """The results of a run.

    steps: each step's loss, its parts and the gradient norm.
    rollouts: each rollout's mean log-probabilities.
    calls: each rank's counted calls.
    """

    steps: tuple[Mapping[str, float], ...]
    rollouts: tuple[Mapping[str, float], ...]
    calls: tuple[Mapping[str, int], ...]


def write(folder: pathlib.Path) -> None:
    """Write the rollouts, the prompts, and the models as Hugging Face and Megatron checkpoints."""
    data = [sys.executable, str(HERE / "slime_data.py"), str(folder), "slime"]
    for kind in ("rollout", "pictures"):
        models = [name for name, model in MODELS.items() if model.data == kind]
        verl_runs.finish([*data, kind, *models], variables("truth", folder, models[0]))
    verl_runs.finish([*data, EVEN], variables("truth", folder, "qwen3_vl"))
    for name in MODELS:
        convert(folder, name)
    write_prompts(folder)
    sizes = {f"sglang_{size}_parallel_size": 1 for size in SIZES}
    (folder / "sizes.yaml").write_text(json.dumps(sizes))


def write_prompts(folder: pathlib.Path) -> None:
    lines = [json.dumps({"text": prompt}) for prompt in PROMPTS]
    (folder / "prompts.jsonl").write_text("\n".join(lines))


def convert(folder: pathlib.Path, name: str) -> None:
    command = [sys.executable, str(HERE / "slime_convert.py"), name, *COMMON, *MODELS[name].layers]
    paths = ["--hf-checkpoint", folder / name, "--save", folder / f"{name}-megatron"]
    command += [*LOCAL, *map(str, paths), "--ckpt-format", "torch_dist"]
    verl_runs.finish(command, variables("truth", folder, name))


def run(
    folder: pathlib.Path,
    who: str,
    name: str = "qwen3",
    devices: int = 1,
    rollouts: str | None = None,
    samples: str | None = None,
) -> Run:
    """Train, on the CPU for "truth", with tensor parallelism over `devices`; return the results.

    rollouts: stem of the files to read; None: the model's data.
    samples: for "engine" only. SGLang then generates the rollouts on one more device; this is the
    stem of the files to write them to.
    """
    model = MODELS[name]
    results = folder / f"{who}-{name}-{devices}-{samples or rollouts}"
    results.mkdir()
    paths = {"--ref-load": f"{name}-megatron", "--hf-checkpoint": name}
    if samples:
        paths["--save-debug-rollout-data"] = f"{samples}_{{rollout_id}}.pt"
        paths |= {"--prompt-data": "prompts.jsonl", "--custom-config-path": "sizes.yaml"}
    else:
        paths["--load-debug-rollout-data"] = f"{rollouts or model.data}_{{rollout_id}}.pt"
    on_ray = devices + bool(samples)
    command = [
        *program(who, on_ray), *COMMON, *model.layers,
        *TRAINING, *(PICTURES if model.sees else ()), *(ENGINE if samples else NO_ENGINE),
        *(part for option, file in paths.items() for part in (option, str(folder / file))),
        "--actor-num-nodes", "1", "--actor-num-gpus-per-node", str(devices),
        "--rollout-num-gpus", "1", "--tensor-model-parallel-size", str(devices),
        *(LOCAL + ON_CPU + model.on_cpu if who == "truth" else model.script),
        *(ON_NPU if who in ("shipped", "engine") else ()),
        *(model.parallel if devices > 1 else ()),
    ]  # fmt: skip
    if who != "truth":
        command = verl_runs.emulated(on_ray, command)
    environment = variables(who, results, name)
    if samples:
        environment |= beside_sglang(results / "triton", environment["PYTHONPATH"])
    if who == "shipped" and model.mindspeed_first:
        environment["SLIME_MINDSPEED_FIRST"] = "1"
    if who != "truth" and model.sees:
        environment["SLIME_WHOLE_BRIDGE"] = "1"
    verl_runs.finish(command, environment)
    return read(results, devices)


def program(who: str, devices: int) -> list[str]:
    """Return the command of slime's own train.py with npu-ops, else that of slime_train.py."""
    if who == "npu_ops":
        slime = str(fetch_slime.tree(who, "slime"))
        return [sys.executable, str(HERE / "stock.py"), slime, str(devices + 2), "train.py"]
    return [sys.executable, str(HERE / "slime_train.py"), str(devices)]


def beside_sglang(folder: pathlib.Path, path: str) -> dict[str, str]:
    """Return variables that give slime's processes SGLang's engine, on the emulated NPU."""
    path = os.pathsep.join([path, str(fetch_slime.router())])
    return verl_grpo_runs.beside_sglang(folder, path) | {
        "SGLANG_NPU_DISABLE_ACL_FORMAT_WEIGHT": "1",  # the emulator has no vendor formats
        "SLIME_ENGINE": "1",
        "SLIME_HOST_IP": "127.0.0.1",
    }


def read(results: pathlib.Path, ranks: int) -> Run:
    lines = [(results / f"{rank}.jsonl").read_text().splitlines() for rank in range(ranks)]
    entries = [[json.loads(line) for line in of_rank] for of_rank in lines]
    steps = tuple(m for m in entries[0] if "train/grad_norm" in m)
    rollouts = tuple(m for m in entries[0] if "rollout/log_probs" in m)
    calls = tuple([m["calls"] for m in of_rank if "calls" in m][-1] for of_rank in entries)
    return Run(steps, rollouts, calls)


def variables(who: str, results: pathlib.Path, name: str) -> dict[str, str]:
    """Return the environment. PYTHONPATH has slime's folders first, then verl's, then npu-ops'."""
    projects = ("slime", "megatron", "mindspeed", "bridge")
    slime, megatron, mindspeed, bridge = (fetch_slime.tree(who, project) for project in projects)
    path = [slime, megatron, mindspeed, bridge, fetch_slime.packages(), fetch_verl.tree()]
    path += [HERE, ROOT / "tests" / "adapters"]
    if who != "truth":
        path.insert(0, fetch_frameworks.tree("fla-core-0.6.0"))
    if who == "npu_ops":
        path.insert(0, HERE / "slime_site")
    if MODELS[name].sees:
        path.insert(0, fetch_frameworks.tree(SEES))
    path += [ROOT, ROOT / "python", *filter(None, [os.environ.get("PYTHONPATH")])]
    changes = {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "NPU_OPS_DISABLE": "" if who in ("npu_ops", "engine") else "all",
        "SLIME_WHO": who,
        "SLIME_RESULTS": str(results),
        "SLIME_BRIDGE": str(bridge),
        "SLIME_SOURCES": os.pathsep.join(map(str, (slime, megatron))),
    }
    changes |= {"SLIME_STOCK": "1"} if who == "npu_ops" else {}
    compiled = {"TORCH_COMPILE_DISABLE": "1"} if who == "truth" else {}  # compiling takes minutes
    return os.environ | verl_runs.ALONE | ONCE | compiled | changes
