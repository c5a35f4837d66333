"""Starts verl_sft.py under torchrun on the emulated NPU or on the CPU, and reads its results."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping

import fetch_verl

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
RANKS = 2
ALONE = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
FP32 = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"


@dataclasses.dataclass(frozen=True)
class Steps:
    """A run's results: loss and gradient norm of each step, and each rank's counted calls."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    calls: tuple[Mapping[str, int], ...]


def overrides(folder: pathlib.Path, model: str, attention: str, *more: str, data="text") -> list:
    """Return settings for verl: 3 steps of 4 rows in fp32, computed alike on two devices."""
    return [
        f"model.path={folder / model}",
        f"+model.override_config.attn_implementation={attention}",
        "model.enable_gradient_checkpointing=False",
        f"+engine.mixed_precision={FP32}",
        "engine.use_torch_compile=False",
        "engine.seed=1",
        "optim.lr=1e-3",
        f"data.train_files={folder / data}.parquet",
        "data.train_batch_size=4",
        "data.micro_batch_size_per_gpu=2",
        "data.use_dynamic_bsz=False",
        "data.max_length=256",
        "data.num_workers=0",
        "data.ignore_input_ids_mismatch=True",
        "trainer.logger=[file]",
        "trainer.total_training_steps=3",
        "trainer.total_epochs=1",
        "trainer.resume_mode=disable",
        *more,
    ]


def write_models(folder: pathlib.Path, names, **changes: str) -> None:
    code = f"import pathlib, verl_data; verl_data.write(pathlib.Path({str(folder)!r}), {names!r})"
    finish([sys.executable, "-c", code], variables(NPU_OPS_DISABLE="all", **changes))


def run(
    folder: pathlib.Path,
    who: str,
    runs: Mapping[str, list[str]],
    ranks: int = RANKS,
    program: str = "verl_sft.py",
) -> dict[str, Steps]:
    """Run each of `runs`, one after the other in the same processes; return the results by name.

    Checkpoints go to the folder of the results.
    """
    runs = {
        name: [f"trainer.default_local_dir='{folder / who / name}'", *lines]
        for name, lines in runs.items()
    }
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks),
        "--standalone", "--no-python", "--", sys.executable, str(HERE / program),
        str(folder), who, json.dumps(runs),
    ]  # fmt: skip
    finish_as(who, ranks, command)
    return {name: read(folder / who, name, ranks) for name in runs}


def finish_as(who: str, devices: int, command: list[str], **changes: str) -> str:
    """Run a command as `who`: "truth" on the CPU, others on emulated NPUs. Return its output."""
    if who != "npu_ops":
        changes = {"NPU_OPS_DISABLE": "all"} | changes
    if who == "truth":
        changes |= {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}
        changes["VERL_USE_EXTERNAL_MODULES"] = "verl_cpu"
    else:
        command = emulated(devices, command)
    return finish(command, variables(**changes))


def emulated(devices: int, command: list[str]) -> list[str]:
    """Return the command that runs `command` on this number of emulated NPUs."""
    return [sys.executable, "-m", "npu_ops_emulator", "--devices", str(devices), "--", *command]


def read(results: pathlib.Path, name: str, ranks: int) -> Steps:
    lines = (results / f"{name}.jsonl").read_text().splitlines()
    steps = [json.loads(line)["data"] for line in lines]
    calls = [json.loads((results / f"{name}.{rank}.json").read_text()) for rank in range(ranks)]
    losses, norms = (tuple(step[f"train/{key}"] for step in steps) for key in ("loss", "grad_norm"))
    return Steps(losses, norms, tuple(calls))


def variables(**changes: str) -> dict[str, str]:
    """Return the environment: verl's packages come before this environment's."""
    path = [
        *fetch_verl.path(),
        fetch_verl.queue(),
        HERE,
        ROOT / "tests" / "adapters",
        ROOT,
        ROOT / "python",
    ]
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([*map(str, path), *([before] if before else [])])
    return os.environ | ALONE | {"PYTHONPATH": path} | changes


def finish(command: list[str], environment: dict[str, str]) -> str:
    """Run a command, and return its stdout and stderr."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3000)
    if done.returncode:
        raise RuntimeError(f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    return done.stdout + done.stderr
