"""verl's own SGLang rollout for the workers of verl_worker.py, with the engine on the CPU.

Selected by `model.external_lib`. The server is verl's, in a Ray process without torch_npu. Its HTTP
interface and the transfer of weights through shared memory are verl's, too.

Changes to verl 0.9.1, which is for SGLang 0.5.12:

- Weights are copied from the device to the host first, because the engine is on the CPU.
- The arguments of SGLang 0.5.23 are no dataclass.
- SGLang 0.5.23 takes weights only between two requests that begin and end an update.
"""

from __future__ import annotations

import functools
import os
import pathlib
import types

import torch
import verl_worker
from sglang.srt.utils import patch_torch
from verl.plugin.platform import get_platform
from verl.workers.rollout import base
from verl.workers.rollout.sglang_rollout import async_sglang_server, sglang_rollout

ON_CPU = {
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "NPU_OPS_EMULATOR": "0",
    "GRPO_WHO": "truth",
    "SGLANG_PLATFORM": "sglang_cpu",
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "verl_cpu",
}


class Weights(sglang_rollout.ServerAdapter):
    """verl's class in each worker; it also writes verl_worker.py's records."""

    async def update_weights(self, weights, global_steps=None, **kwargs):
        await self._init_server_adapter()
        if self._engine is not None:
            await self._engine.begin_weight_update()
        await super().update_weights(weights, global_steps, **kwargs)
        if self._engine is not None:
            await self._engine.end_weight_update()
        verl_worker.write_down(self.config)


def with_sessions(adapter: type) -> None:
    """Add the methods that SGLang 0.5.23's interface has beyond 0.5.12's; its server takes both."""
    for name in ("begin_weight_update", "end_weight_update"):
        call = functools.partialmethod(adapter._make_async_request, name, {})
        setattr(adapter, name, call)
    adapter.__abstractmethods__ = frozenset()


def begin() -> None:
    with_sessions(sglang_rollout.AsyncHttpServerAdapter)
    base._ROLLOUT_REGISTRY["sglang", "async"] = f"{__name__}.Weights"
    sglang_rollout._to_ipc_device = torch.Tensor.cpu
    patch_torch.monkey_patch_torch_reductions = lambda: None  # it translates GPU numbers
    torch.multiprocessing.set_sharing_strategy("file_system")  # its server is not a child process
    # verl checks whether SGLang can keep weights in memory while it sleeps; here it cannot.
    async_sglang_server.dataclasses = types.SimpleNamespace(fields=lambda arguments: ())
    platform = type(get_platform())
    theirs = platform.rollout_env_vars
    changes = ON_CPU | {"PYTHONPATH": without_npus(os.environ["PYTHONPATH"])}
    platform.rollout_env_vars = lambda self: theirs(self) | changes


def without_npus(path: str) -> str:
    """Drop folders that verl_grpo_runs.py adds: SGLang would take torch_npu for an NPU.

    It also needs its own Triton.
    """
    folders = [pathlib.Path(folder) for folder in path.split(os.pathsep)]
    kept = [
        x for x in folders if not (x / "triton").is_symlink() and not (x / "torch_npu").exists()
    ]
    return os.pathsep.join(map(str, kept))


begin()
