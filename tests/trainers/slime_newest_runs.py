"""Runs slime of August 2026 on the emulated NPU or on the CPU, and reads its results.

On the NPU slime's own train.py runs, on the CPU slime_newest.py.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys

import fetch_frameworks
import fetch_slime
import fetch_slime_newest
import fetch_verl
import slime_runs
import verl_runs
from slime_runs import HERE, ROOT, Model

ROPE = "--use-rotary-position-embeddings"
DELTA_NET = (
    "--num-layers", "4", "--attention-output-gate", "--rotary-percent", "0.5",
    "--apply-layernorm-1p", "--spec",
)  # fmt: skip
PLUGINS = "slime_plugins.models"
# Megatron-Bridge's model, built by a function given with --spec.
BRIDGES = Model(
    layers=(
        "--num-layers", "2", "--position-embedding-type", "mrope", "--mrope-section", "8", "4", "4",
        *slime_runs.PICTURES,
    ),
    script=("--spec", "npu_ops_adapters.slime.qwen3_vl", "model_provider"),
    on_cpu=("--spec", "slime_qwen3_vl", "on_cpu"),
)  # fmt: skip
MODELS = {
    "qwen3": Model((ROPE, "--num-layers", "2")),
    "qwen3_5": Model(
        (ROPE, *DELTA_NET, f"{PLUGINS}.qwen3_5", "get_qwen3_5_spec"),
        parallel=("--sequence-parallel",),
    ),
    # As in slime's script, which sets "rope".
    "qwen3_5_vl": Model(
        (
            *DELTA_NET, f"{PLUGINS}.qwen3_5_vl", "get_qwen3_5_vl_model_provider",
            "--position-embedding-type", "rope",
        ),
        data="pictures",
    ),
    "qwen3_vl": dataclasses.replace(BRIDGES, data="pictures"),
    "qwen3_vl-text": BRIDGES,
}  # fmt: skip
HF = {"qwen3_5_vl": "qwen3_5", "qwen3_vl-text": "qwen3_vl"}  # folders not named like the model
COMMON = [part for part in slime_runs.COMMON if part != ROPE]
ON_CPU = ("--custom-megatron-init-path", "slime_newest.with_local_layers")


def write(folder: pathlib.Path) -> None:
    """Write the models in Hugging Face's form, which slime now loads itself, and the rollouts.

    slime cannot load Qwen3-VL, so v0.2.2 writes its Megatron checkpoint.
    """
    data = [sys.executable, str(HERE / "slime_data.py"), str(folder), "slime"]
    verl_runs.finish([*data, "rollout", "qwen3"], variables("truth", folder))
    of_bridge = slime_runs.variables("truth", folder, "qwen3_vl")
    verl_runs.finish([*data, "pictures", "qwen3_vl"], of_bridge)
    slime_runs.convert(folder, "qwen3_vl")
    verl_runs.finish([*data, "pictures", "qwen3_5"], variables("truth", folder))


def run(
    folder: pathlib.Path, who: str, name: str, devices: int = 1, rollouts: str | None = None
) -> slime_runs.Run:
    """Train, on the CPU for "truth", with tensor parallelism over `devices`; return the results.

    rollouts: stem of the files to read; None: the model's data.
    """
    results = folder / f"{who}-{name}-{devices}{f'-{rollouts}' if rollouts else ''}"
    results.mkdir()
    model, theirs = MODELS[name], str(folder / HF.get(name, name))
    checkpoint = f"{theirs}-megatron" if by_bridge(name) else theirs
    command = [
        *program(who, devices), *COMMON,
        *slime_runs.TRAINING, *slime_runs.NO_ENGINE, *model.layers,
        "--ref-load", checkpoint, "--hf-checkpoint", theirs,
        "--load-debug-rollout-data", str(folder / f"{rollouts or model.data}_{{rollout_id}}.pt"),
        "--actor-num-nodes", "1", "--actor-num-gpus-per-node", str(devices),
        "--rollout-num-gpus", "1", "--tensor-model-parallel-size", str(devices),
        *(slime_runs.LOCAL + ON_CPU + model.on_cpu if who == "truth" else model.script),
        *(model.parallel if devices > 1 else ()),
    ]  # fmt: skip
    if who != "truth":
        command = verl_runs.emulated(devices, command)
    verl_runs.finish(command, variables(who, results, by_bridge(name)))
    return slime_runs.read(results, devices)


def program(who: str, devices: int) -> list[str]:
    """Return the command of slime's own program; for "truth", of slime_newest.py on CPUs."""
    if who == "truth":
        return [sys.executable, str(HERE / "slime_newest.py"), str(devices)]
    slime = str(fetch_slime_newest.tree("slime"))
    return [sys.executable, str(HERE / "stock.py"), slime, str(devices + 2), "train.py"]


def by_bridge(name: str) -> bool:
    return HF.get(name, name) == "qwen3_vl"


def variables(who: str, results: pathlib.Path, bridge: bool = False) -> dict[str, str]:
    """Return the environment. PYTHONPATH has slime's folders first, then verl's, then npu-ops'."""
    slime, megatron, mindspeed = map(fetch_slime_newest.tree, ("slime", "megatron", "mindspeed"))
    path = [slime, megatron, fetch_slime.packages(), fetch_verl.tree(), HERE]
    path += [ROOT / "tests" / "adapters", ROOT, ROOT / "python"]
    if who != "truth":
        path[:0] = [HERE / "slime_site", mindspeed, fetch_frameworks.tree("fla-core-0.6.0")]
    changes = {} if who == "truth" else {"SLIME_STOCK": "1"}
    if bridge:
        source = fetch_slime.tree("truth", "bridge")
        path[:0] = [fetch_frameworks.tree(slime_runs.SEES), source]
        changes["SLIME_BRIDGE"] = str(source)
    path += filter(None, [os.environ.get("PYTHONPATH")])
    changes |= {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "NPU_OPS_DISABLE": "" if who == "npu_ops" else "all",
        "SLIME_WHO": who,
        "SLIME_RESULTS": str(results),
        "SLIME_SOURCES": os.pathsep.join(map(str, (slime, megatron))),
    }
    compiled = {"TORCH_COMPILE_DISABLE": "1"} if who == "truth" else {}
    return os.environ | verl_runs.ALONE | slime_runs.ONCE | compiled | changes
