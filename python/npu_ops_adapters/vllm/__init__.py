"""vLLM on NPUs, which is vllm-ascend 0.18.0, 0.23.0 and its main branch: one file for each op.

vLLM loads `register` as a plugin in each of its processes. The functions that vllm-ascend puts into
vLLM are replaced as vllm-ascend is imported. What npu-ops does not support runs as without it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable

import npu_ops_import_hook

from npu_ops_adapters.patching import Patch


def patches() -> Iterable[Patch]:
    """All of them, in the order of their names."""
    for module in pkgutil.iter_modules(__path__):
        if module.name != "functions":
            yield from importlib.import_module(f"{__name__}.{module.name}").patches()


def register() -> None:
    """The entry point of the group vllm.general_plugins. vLLM would stop at an exception here."""
    with npu_ops_import_hook.reporting:
        import npu_ops_adapters

        npu_ops_adapters.apply()
