"""verl's processes import this by `model.external_lib`: the rollout, and the workers' records.

GRPO_WHO: who computes, WHO of verl_sft.py. After a worker has sent its weights, it writes
RESULTS.RANK.json, with the calls of each operator. For each pass of actor or reference, the file
maps each sequence's tokens to its log-probabilities.

rollout.engine_kwargs.transformers: {"results": RESULTS, ...}; verl_rollout.py reads the others.
"""

from __future__ import annotations

import collections
import json
import os
import pathlib

import torch
import verl_rollout
import verl_sft
from verl.workers import engine_workers
from verl.workers.engine.fsdp import transformer_impl

WHO = os.environ["GRPO_WHO"]
CALLS, PASSES = collections.Counter(), []


class Weights(verl_rollout.Weights):
    """Writes the worker's records after each update of the weights."""

    async def update_weights(self, weights, global_steps=None, **kwargs):
        await super().update_weights(weights, global_steps, **kwargs)
        write_down(self.config)


def write_down(config) -> None:
    """Write the worker's records. config: the rollout's."""
    name = config.engine_kwargs[verl_rollout.NAME]["results"]
    found = {"calls": CALLS, "passes": PASSES}
    pathlib.Path(f"{name}.{os.environ['RANK']}.json").write_text(json.dumps(found))


class Worker(engine_workers.TrainingWorker):
    """The worker of actor and reference; records the log-probabilities it returns."""

    def infer_batch(self, data):
        tokens = [row.tolist() for row in data["input_ids"].unbind()]
        out = super().infer_batch(data)
        rows = [row.tolist() for row in out["log_probs"].unbind()]
        PASSES.append({" ".join(map(str, key)): row for key, row in zip(tokens, rows, strict=True)})
        return out


def begin() -> None:
    verl_rollout.register(f"{__name__}.Weights")
    engine_workers.ActorRolloutRefWorker.actor_worker_cls = Worker
    engine_workers.ActorRolloutRefWorker.ref_worker_cls = Worker
    if WHO == "truth":  # verl needs a device number and pinned memory, which a CPU lacks
        transformer_impl.load_fsdp_model_to_gpu = lambda model: None
        torch.Tensor.pin_memory = lambda self: self
    verl_sft.count(CALLS, WHO)


begin()
