"""Adapters for flash-linear-attention (fla) 0.5.2, 0.6 and main: one file for each op.

If fla supports backends for a function, npu-ops registers a backend; other functions are replaced.
In both cases fla computes the calls that npu-ops does not support.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable

from npu_ops_adapters.patching import Patch


def patches() -> Iterable[Patch]:
    """Yield all patches, in the order of their modules' names."""
    for module in pkgutil.iter_modules(__path__):
        if module.name != "functions":
            yield from importlib.import_module(f"{__name__}.{module.name}").patches()
