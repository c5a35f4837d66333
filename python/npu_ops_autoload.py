"""Applies npu-ops' patches (`npu_ops_adapters`) to a framework when it is imported.

torch calls `install` during its own import (entry point group `torch.backends`). An exception here
would make `import torch` fail. So this file and `npu_ops_import_hook`:

- use only the standard library;
- import the rest of npu-ops only when a framework that npu-ops patches is imported;
- turn any error into one warning: the framework then runs its own code.
"""

from __future__ import annotations

import logging
import os
import sys


def install() -> None:
    """Watch imports, and apply the adapters to modules that are already imported. Never raises."""
    try:
        import npu_ops_import_hook
    except ImportError as error:  # an editable install that is older than npu_ops_import_hook
        logging.getLogger("npu_ops").warning("no adapters: %s; install npu-ops again", error)
        return
    with npu_ops_import_hook.reporting:
        # npu_ops.core.env reads NPU_OPS_DISABLE, too. But `all` must work even if npu_ops cannot be
        # imported.
        if "all" in os.environ.get("NPU_OPS_DISABLE", "").replace(" ", "").split(","):
            return
        npu_ops_import_hook.watch(_imported, _awaited)
        npu_ops_import_hook.tell_when_torch_is_there(_awaited)
        there = list(filter(npu_ops_import_hook.is_watched, list(sys.modules)))
        for name in there:
            npu_ops_import_hook.tell_when_imported(sys.modules[name], _imported)
        if there:
            import npu_ops_adapters

            npu_ops_adapters.apply()


def _imported(name: str) -> None:
    import npu_ops_adapters

    npu_ops_adapters.imported(name)


def _awaited(name: str) -> None:
    import npu_ops_adapters

    npu_ops_adapters.awaited(name)
