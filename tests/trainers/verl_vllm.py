"""verl's own vLLM rollout for the workers of verl_worker.py, with the engine on the emulated NPU.

Selected by `model.external_lib`. Server, engine and worker are verl's, vLLM's and vllm-ascend's, in
their own processes. The transfer of weights through shared memory is theirs, too. The server's
processes log which npu-ops operators they call.
"""

from __future__ import annotations

import verl_worker
from verl.plugin.platform import get_platform
from verl.workers.rollout import base
from verl.workers.rollout.vllm_rollout import vllm_rollout


class Weights(vllm_rollout.ServerAdapter):
    """verl's class in each worker; it also writes verl_worker.py's records."""

    async def update_weights(self, weights, global_steps=None, **kwargs):
        await super().update_weights(weights, global_steps, **kwargs)
        verl_worker.write_down(self.config)


def begin() -> None:
    base._ROLLOUT_REGISTRY["vllm", "async"] = f"{__name__}.Weights"
    platform = type(get_platform())
    theirs = platform.rollout_env_vars
    platform.rollout_env_vars = lambda self: theirs(self) | {"NPU_OPS_LOG": "calls"}


begin()
