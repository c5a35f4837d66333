"""Starts relax_train.py, on the emulated NPU or on the CPU, and reads what it wrote."""

from __future__ import annotations

import os
import pathlib
import sys

import fetch_relax
import fetch_slime
import fetch_verl
import slime_runs
import verl_runs
from slime_runs import HERE, ROOT

MODELS = {"qwen3": ("--num-layers", "2")}
NOT_RELAX = ("--data-pad-size-multiplier", "16")
WITH_REFERENCE = ("--use-kl-loss",)
NO_ENGINE = (
    "--disable-rollout-global-dataset", "--rollout-num-gpus", "1",
    "--rollout-function-path", "slime_doubles.roll_out",
)  # fmt: skip
# As in Relax's scripts for NPUs: otherwise MindSpeed makes a mask of all pairs of 4096 tokens.
ON_NPU = (*slime_runs.ON_NPU, "--use-flash-attn")
ON_CPU = ("--custom-megatron-init-path", "relax_worker.packed", "--distributed-backend", "gloo")


def write(folder: pathlib.Path) -> None:
    """The models' configurations and tokenizers, Megatron's weights of them, and the rollouts."""
    truth = variables("truth", folder)
    data = [sys.executable, str(HERE / "slime_data.py"), str(folder), "relax"]
    verl_runs.finish([*data, "rollout", *MODELS], truth)
    for model in MODELS:
        weights = ("--save", folder / f"{model}-megatron", "--save-interval", "1")
        weights += ("--no-save-optim", "--ref-load", folder / "nothing")
        start("truth", folder, model, 1, weights, folder)


def run(folder: pathlib.Path, who: str, model: str = "qwen3", devices: int = 1) -> slime_runs.Run:
    """On the CPU for "truth"; tensors are parallel over the devices."""
    results = folder / f"{who}-{model}-{devices}"
    results.mkdir()
    weights = ("--ref-load", folder / f"{model}-megatron")
    start(who, folder, model, devices, weights, results)
    return slime_runs.read(results, devices)


def start(who: str, folder: pathlib.Path, model: str, devices: int, weights, results) -> None:
    without = NOT_RELAX + WITH_REFERENCE if "--save" in weights else NOT_RELAX
    training = [part for part in slime_runs.TRAINING if part not in without]
    files = ("--hf-checkpoint", folder / model)
    files += ("--load-debug-rollout-data", folder / "rollout_{rollout_id}.pt")
    command = [
        *(sys.executable, str(HERE / "relax_train.py"), str(devices)),
        *(*slime_runs.COMMON, *MODELS[model], *training, *NO_ENGINE, *map(str, files + weights)),
        *("--actor-num-nodes", "1", "--actor-num-gpus-per-node", str(devices)),
        *("--num-gpus-per-node", str(devices), "--tensor-model-parallel-size", str(devices)),
        *(slime_runs.LOCAL + ON_CPU if who == "truth" else ON_NPU),
    ]
    if who != "truth":
        command = verl_runs.emulated(devices, command)
    verl_runs.finish(command, variables(who, results))


def variables(who: str, results: pathlib.Path) -> dict[str, str]:
    """Relax's sources and packages come before verl's, and those before ours."""
    projects = ("relax", "megatron", "bridge", "queue")
    projects += ("mindspeed",) if who != "truth" else ()
    folders = {project: fetch_relax.tree(who, project) for project in projects}
    path = [*folders.values(), fetch_relax.packages(), fetch_slime.packages(), fetch_verl.tree()]
    path += [HERE, ROOT / "tests" / "adapters", ROOT, ROOT / "python"]
    path += filter(None, [os.environ.get("PYTHONPATH")])
    changes = {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "NPU_OPS_DISABLE": "" if who == "npu_ops" else "all",
        "SLIME_WHO": who,
        "SLIME_RESULTS": str(results),
        "SLIME_BRIDGE": str(folders["bridge"]),
        "SLIME_SOURCES": str(folders["megatron"]),
    }
    on_cpu = {"TORCH_COMPILE_DISABLE": "1", "RELAX_DEVICE_TYPE": "cpu"}
    changes |= on_cpu if who == "truth" else {}
    return os.environ | verl_runs.ALONE | slime_runs.ONCE | changes
