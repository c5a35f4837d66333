"""verl's own SFT trainer, several times in one process of torchrun.

python -m torch.distributed.run --no-python -- python verl_sft.py FOLDER WHO RUNS

FOLDER: with the models. WHO: "shipped", with verl's NPU patches and without npu-ops; "npu_ops",
with it and without them; "truth", on the CPU without either. RUNS: JSON, a list of overrides of
verl's configuration for each name. Written to FOLDER/WHO for each run: NAME.jsonl, verl's metrics
of each step, and NAME.RANK.json, how often each operator was called on that rank.
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

    if who == "truth":  # it loads what it saves back to a device by its number
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
    """For all runs, as torch's rendezvous is for one."""
    start = torch.distributed.init_process_group

    def once(*args, **kwargs):
        if not torch.distributed.is_initialized():
            start(*args, **kwargs)

    torch.distributed.init_process_group = once
    sft_trainer.destroy_global_process_group = lambda: None


def count(calls: collections.Counter, who: str) -> None:
    """Note the calls that reach npu_ops, and those of torch_npu's operators by their names."""

    def note(name: str) -> None:
        calls[name] += 1

    counting.on_calls(counting.operators(), note)
    if who != "truth":
        import torch_npu

        counting.on_calls(counting.TORCH_NPU, note, torch_npu)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
