"""Stand-ins for modules that slime imports, but that runs with saved rollouts do not use.

SGLang and its router: no engine starts. wandb: nothing is logged to it.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Mapping


class NoArguments:
    """Replaces SGLang's ServerArgs and RouterArgs: adds only the arguments that slime reads."""

    @staticmethod
    def add_cli_args(parser, **options) -> None:
        if not options:  # ServerArgs
            for name in ("--dp-size", "--pp-size", "--ep-size"):
                parser.add_argument(name, dest=f"{LONG[name]}_parallel_size", type=int, default=1)
            parser.add_argument("--enable-dp-attention", action="store_true")
            parser.add_argument("--speculative-algorithm", default=None)


LONG = {"--dp-size": "data", "--pp-size": "pipeline", "--ep-size": "expert"}
MEMORY = ("GPU_MEMORY_TYPE_CUDA_GRAPH", "GPU_MEMORY_TYPE_KV_CACHE", "GPU_MEMORY_TYPE_WEIGHTS")
MODULES = {
    "sglang.srt.constants": dict.fromkeys(MEMORY),
    "sglang.srt.server_args": {"ServerArgs": NoArguments},
    "sglang.srt.utils": dict.fromkeys(("MultiprocessingSerializer", "kill_process_tree")),
    "sglang.srt.utils.patch_torch": {"monkey_patch_torch_reductions": None},
    "sglang.srt.weight_sync.tensor_bucket": {"FlattenedTensorBucket": None},
    "sglang_router.launch_router": {"RouterArgs": NoArguments},
    "wandb": {},
}


def install(modules: Mapping[str, Mapping[str, object]] = MODULES) -> None:
    for name, content in modules.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            package = ".".join(parts[:i])
            module = sys.modules.setdefault(package, types.ModuleType(package))
            module.__path__, module.__version__ = [], "0"
            module.__spec__ = importlib.machinery.ModuleSpec(package, None, is_package=True)
        vars(sys.modules[name]).update(content)


def roll_out(*args, **kwargs):
    """For --rollout-function-path, because slime's own function would import SGLang's client."""
    raise RuntimeError("rollouts are read from files")
