"""vLLM on NPUs with vllm-ascend 0.18.0, 0.23.0 and its main branch: one file for each op.

vLLM loads `register` as a plugin in each of its processes. Functions that vllm-ascend sets in vLLM
are replaced when vllm-ascend is imported. Calls that npu-ops does not support run unchanged.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Iterable

import npu_ops_import_hook

from npu_ops_adapters.patching import Patch


def patches() -> Iterable[Patch]:
    """Yield all patches, in the order of their names."""
    for module in pkgutil.iter_modules(__path__):
        if module.name != "functions":
            yield from importlib.import_module(f"{__name__}.{module.name}").patches()


def register() -> None:
    """Apply the adapters: the entry point of vllm.general_plugins.

    An error is logged and not raised, because an exception here would stop vLLM.
    """
    with npu_ops_import_hook.reporting:
        import npu_ops_adapters
        from npu_ops.core import env

        if env.settings.consistent:
            # vLLM's cache has the same key for a model that was compiled in the default mode.
            os.environ["VLLM_DISABLE_COMPILE_CACHE"] = "1"
        npu_ops_adapters.apply()
