"""transformers 4.57 and 5: one file for each op, which patches every model that has it.

A model looks these functions up in its own module at each call, so they are replaced there, before
a model is built or after. Attention is a name besides: `attn_implementation="npu_ops"`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable

from npu_ops_adapters.patching import Patch


def patches() -> Iterable[Patch]:
    """All of them, in the order of their names."""
    for module in pkgutil.iter_modules(__path__):
        if module.name != "models":
            yield from importlib.import_module(f"{__name__}.{module.name}").patches()
