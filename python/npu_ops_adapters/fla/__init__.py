"""flash-linear-attention 0.5.2, its main branch and 0.6: one file for each op.

Where fla asks for a backend before it computes, ours is in its registry; elsewhere its function is
replaced. Either way what is not ours is computed by fla's own.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable

from npu_ops_adapters.patching import Patch


def patches() -> Iterable[Patch]:
    """All of them, in the order of their names."""
    for module in pkgutil.iter_modules(__path__):
        if module.name != "functions":
            yield from importlib.import_module(f"{__name__}.{module.name}").patches()
