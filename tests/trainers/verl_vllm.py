"""verl's own rollout of vLLM, for verl_worker.py's workers: the engine on the emulated NPU.

Named by `model.external_lib`. Server, engine and worker are verl's, vLLM's and vllm-ascend's, in
their own processes, and so is the weights' way through shared memory. The server's processes say
which operators of npu-ops they call.
"""

from __future__ import annotations

import verl_worker
from verl.plugin.platform import get_platform
from verl.workers.rollout import base
from verl.workers.rollout.vllm_rollout import vllm_rollout


class Weights(vllm_rollout.ServerAdapter):
    """In each worker: verl's, and what verl_worker.py writes down."""

    async def update_weights(self, weights, global_steps=None, **kwargs):
        await super().update_weights(weights, global_steps, **kwargs)
        verl_worker.write_down(self.config)


def begin() -> None:
    base._ROLLOUT_REGISTRY["vllm", "async"] = f"{__name__}.Weights"
    platform = type(get_platform())
    theirs = platform.rollout_env_vars
    platform.rollout_env_vars = lambda self: theirs(self) | {"NPU_OPS_LOG": "calls"}


begin()
