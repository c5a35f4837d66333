"""Starts Relax on the emulated NPU or on the CPU, and reads its results.

Runs with npu-ops start Relax's own program. The others start relax_train.py, which also changes
Relax so that it runs on this machine.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys

import fetch_frameworks
import fetch_relax
import fetch_slime
import fetch_verl
import slime_runs
import verl_runs
from slime_runs import HERE, ROOT, SEES

MODELS = {
    "qwen3": ("--num-layers", "2"),
    "qwen3_vl": ("--num-layers", "2", "--multimodal-keys", '{"image":"image"}'),
    "qwen3_5": (
        "--num-layers", "4", "--apply-layernorm-1p", "--position-embedding-type", "rope",
        "--rotary-percent", "0.5", "--attention-output-gate",
    ),
}  # fmt: skip
# From Relax's scripts for GPUs, because none of those for NPUs trains Qwen3-VL.
BRIDGE = ("--megatron-to-hf-mode", "bridge", "--no-rope-fusion")
RECOMPUTED = (
    "--recompute-granularity", "full", "--recompute-method", "uniform",
    "--recompute-num-layers", "1",
)  # fmt: skip
SERVICES = 8  # services of Relax; each asks Ray for a CPU
# Relax sets these options itself, except if Bridge converts the weights.
ONLY_WEIGHTS = ("--no-load-optim", "--no-load-rng", "--finetune")
# Layouts on more than one rank. Relax's scripts for NPUs split sequences.
LAYOUTS = {"split": ("--sequence-parallel",), "whole": ()}
AS_SCRIPTS = {"qwen3_vl": BRIDGE + RECOMPUTED, "qwen3_5": BRIDGE + RECOMPUTED}
BATCHES = {
    "qwen3_vl": slime_runs.PICTURES,
    "qwen3_5": ("--micro-batch-size", "1", "--qkv-format", "bshd"),
}
DATA = {"rollout": ("qwen3", "qwen3_5"), "pictures": ("qwen3_vl",)}
PROVIDERS = {"qwen3_vl": "slime_qwen3_vl.provide", "qwen3_5": "relax_qwen3_5.provide"}
NOT_RELAX = ("--data-pad-size-multiplier", "16")
WITH_REFERENCE = ("--use-kl-loss",)
NO_ENGINE = (
    "--disable-rollout-global-dataset", "--rollout-num-gpus", "1",
    "--rollout-function-path", "slime_doubles.roll_out",
)  # fmt: skip
# As in Relax's scripts for NPUs: otherwise MindSpeed allocates a 4096 x 4096 mask.
ON_NPU = ("--use-flash-attn",)
OBSERVED = ("--custom-megatron-init-path", "relax_worker.on_megatron")
ON_CPU = ("--custom-megatron-init-path", "relax_worker.packed", "--distributed-backend", "gloo")


def write(folder: pathlib.Path) -> None:
    """Write the models' configurations and tokenizers, Megatron's checkpoints, and the rollouts.

    Megatron draws the weights. Qwen3.5's are drawn by transformers, and MindSpeed-Bridge converts
    them.
    """
    data = [sys.executable, str(HERE / "slime_data.py"), str(folder), "relax"]
    for kind, models in DATA.items():
        verl_runs.finish([*data, kind, *models], variables("truth", folder, models[0]))
    for model in MODELS:
        converted = model == "qwen3_5"
        weights = ("--save", folder / f"{model}-megatron", "--save-interval", "1")
        weights += ("--no-save-optim", "--ref-load", folder / (model if converted else "nothing"))
        start("shipped" if converted else "truth", folder, model, 1, weights, folder)


def run(
    folder: pathlib.Path,
    who: str,
    model: str = "qwen3",
    devices: int = 1,
    layout: str = "whole",
) -> slime_runs.Run:
    """Train, on the CPU for "truth", with tensor parallelism over `devices`; return the results."""
    results = folder / f"{who}-{model}-{devices}-{layout}"
    results.mkdir()
    # from Hugging Face weights, as in Relax's scripts
    converted = (who, model) == ("npu_ops", "qwen3_5")
    weights = ("--ref-load", folder / (model if converted else f"{model}-megatron"), *ONLY_WEIGHTS)
    start(who, folder, model, devices, weights, results, LAYOUTS[layout] if devices > 1 else ())
    return slime_runs.read(results, devices)


def start(who, folder: pathlib.Path, model, devices: int, weights, results, layout=()) -> None:
    without = NOT_RELAX + WITH_REFERENCE if "--save" in weights else NOT_RELAX
    training = [part for part in slime_runs.TRAINING if part not in without]
    rollouts = "pictures" if model in DATA["pictures"] else "rollout"
    files = ("--hf-checkpoint", folder / model)
    files += ("--load-debug-rollout-data", folder / f"{rollouts}_{{rollout_id}}.pt")
    if who == "truth":
        place = slime_runs.LOCAL + ON_CPU
        if model in PROVIDERS:
            place += ("--custom-model-provider-path", PROVIDERS[model])
    else:
        place = ON_NPU + AS_SCRIPTS.get(model, ())
    if who == "shipped":
        if model == "qwen3_vl":  # Bridge 0.3.1 cannot recompute layers with lists
            place = ON_NPU + BRIDGE
        place += OBSERVED
    command = [
        *program(who, devices),
        *(*slime_runs.COMMON, *MODELS[model], *training, *BATCHES.get(model, ()), *NO_ENGINE),
        *(*map(str, files + weights), *place, *layout),
        *("--actor-num-nodes", "1", "--actor-num-gpus-per-node", str(devices)),
        *("--num-gpus-per-node", str(devices), "--tensor-model-parallel-size", str(devices)),
    ]
    if who != "truth":
        command = verl_runs.emulated(devices, command)
    verl_runs.finish(command, variables(who, results, model))


def program(who: str, devices: int) -> list[str]:
    """Return the command of Relax's own program with npu-ops, else that of relax_train.py."""
    if who != "npu_ops":
        return [sys.executable, str(HERE / "relax_train.py"), str(devices)]
    relax = str(fetch_relax.tree(who, "relax"))
    services = json.dumps({"actor": [1, devices]})
    own = ("-m", "relax.entrypoints.train", "--resource", services, "--max-staleness", "0")
    own += ("--num-data-storage-units", "1")
    return [sys.executable, str(HERE / "stock.py"), relax, str(devices + SERVICES), *own]


def variables(who: str, results: pathlib.Path, model: str) -> dict[str, str]:
    """Return the environment. PYTHONPATH has Relax's folders first, then verl's, then npu-ops'."""
    projects = ("relax", "megatron", "bridge", "queue")
    projects += ("mindspeed", "mindspeed_bridge") if who != "truth" else ()
    folders = {project: fetch_relax.tree(who, project) for project in projects}
    path = [*folders.values(), fetch_relax.packages(), fetch_slime.packages(), fetch_verl.tree()]
    path += [HERE, ROOT / "tests" / "adapters", ROOT, ROOT / "python"]
    path += filter(None, [os.environ.get("PYTHONPATH")])
    if model in DATA["pictures"]:
        path.insert(0, fetch_frameworks.tree(SEES))
    if who == "npu_ops":
        path.insert(0, HERE / "slime_site")
    changes = {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "NPU_OPS_DISABLE": "" if who == "npu_ops" else "all",
        "SLIME_WHO": who,
        "SLIME_RESULTS": str(results),
        "SLIME_BRIDGE": str(folders["bridge"]),
        "SLIME_SOURCES": str(folders["megatron"]),
    }
    on_cpu = {"TORCH_COMPILE_DISABLE": "1", "RELAX_DEVICE_TYPE": "cpu"}
    whole = {"SLIME_WHOLE_BRIDGE": "1"} if model in AS_SCRIPTS else {}
    more = {"truth": on_cpu, "shipped": whole, "npu_ops": {"SLIME_STOCK": "1"}}
    changes |= more[who]
    return os.environ | verl_runs.ALONE | slime_runs.ONCE | changes
