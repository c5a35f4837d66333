"""What verl's processes import by `model.external_lib`: the rollout, and what workers write down.

GRPO_WHO: who it is, as for verl_sft.py. Each worker, when it has sent its weights, writes
RESULTS.RANK.json with the calls of each operator and, for each pass of actor or reference, the
log-probabilities of each sequence by its tokens.

rollout.engine_kwargs.transformers: {"results": RESULTS, ...}, the others verl_rollout.py's.
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
    """Writes down what was noted since the worker began."""

    async def update_weights(self, weights, global_steps=None, **kwargs):
        await super().update_weights(weights, global_steps, **kwargs)
        write_down(self.config)


def write_down(config) -> None:
    """`config`: of the rollout."""
    name = config.engine_kwargs[verl_rollout.NAME]["results"]
    found = {"calls": CALLS, "passes": PASSES}
    pathlib.Path(f"{name}.{os.environ['RANK']}.json").write_text(json.dumps(found))


class Worker(engine_workers.TrainingWorker):
    """Of actor and reference: notes the log-probabilities it returns."""

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
    if WHO == "truth":  # weights go to a device and back: to its number, and to pinned memory
        transformer_impl.load_fsdp_model_to_gpu = lambda model: None
        torch.Tensor.pin_memory = lambda self: self
    verl_sft.count(CALLS, WHO)


begin()
