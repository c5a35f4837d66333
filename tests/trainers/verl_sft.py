"""Run verl's own SFT trainer several times in one process of torchrun.

python -m torch.distributed.run --no-python -- python verl_sft.py FOLDER WHO RUNS

FOLDER: has the models.
WHO: "shipped", with verl's NPU patches alone; "npu_ops", with npu-ops, which keeps its functions
when verl applies these patches; "truth", on the CPU without either.
RUNS: JSON, {name: list of overrides of verl's configuration}.

For each run FOLDER/WHO gets NAME.jsonl, verl's metrics of each step, and NAME.RANK.json, the calls
of each operator on that rank.
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
import sys
import warnings

import counting
import torch


def main(folder: str, who: str, runs: str) -> None:
    results = pathlib.Path(folder) / who
    results.mkdir(exist_ok=True)
    from hydra import compose, initialize_config_module
    from verl.trainer import sft_trainer
    from verl.utils.checkpoint import checkpoint_handler
    from verl.utils.device import auto_set_device

    if who == "truth":  # to save, verl moves the model to a device number, which a CPU lacks
        checkpoint_handler.CheckpointHandler.save_checkpoint = lambda self, step: None
    keep_process_group(sft_trainer)
    calls = collections.Counter()
    count(calls, who)
    with initialize_config_module("verl.trainer.config", version_base=None):
        for name, overrides in json.loads(runs).items():
            os.environ["VERL_FILE_LOGGER_PATH"] = str(results / f"{name}.jsonl")
            calls.clear()
            torch.manual_seed(0)
            config = compose("sft_trainer_engine", overrides)
            if who == "truth":
                config.trainer.device = "cpu"
            auto_set_device(config)
            sft_trainer.run_sft(config)
            rank = os.environ["RANK"]
            (results / f"{name}.{rank}.json").write_text(json.dumps(calls))
    torch.distributed.destroy_process_group()


def keep_process_group(sft_trainer) -> None:
    """Keep one process group for all runs, because torch's rendezvous works once."""
    start = torch.distributed.init_process_group

    def once(*args, **kwargs):
        if not torch.distributed.is_initialized():
            start(*args, **kwargs)

    torch.distributed.init_process_group = once
    sft_trainer.destroy_global_process_group = lambda: None


def count(calls: collections.Counter, who: str) -> None:
    """Count the calls of npu_ops, and those of torch_npu's operators, by name."""

    def note(name: str) -> None:
        calls[name] += 1

    counting.on_calls(counting.operators(), note)
    if who != "truth":
        import torch_npu

        counting.on_calls(counting.TORCH_NPU, note, torch_npu)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
