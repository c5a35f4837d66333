"""transformers 4.57 to 5.23: one file for each op, which patches every model that has it.

`models` says which models those are, `equivalence` whether a function is one that npu-ops has.

A model looks these functions up in its own module, so they are replaced there: at each call, and up
to 5.10 those of Gated Delta Net when a layer is built. Attention is a name besides:
`attn_implementation="npu_ops"`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable

from npu_ops_adapters.patching import Patch
from npu_ops_adapters.transformers import models


def patches() -> Iterable[Patch]:
    """All of them, in the order of their names."""
    for module in pkgutil.iter_modules(__path__):
        found = importlib.import_module(f"{__name__}.{module.name}")
        yield from getattr(found, "patches", tuple)()


def modules() -> list[str]:
    """The modules of installed models that would be patched when they are imported."""
    return models.modules()
