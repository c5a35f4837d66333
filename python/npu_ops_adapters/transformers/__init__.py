"""transformers 4.57 to 5.23: one file for each op; it patches every model that has the op.

`models` lists the models. `equivalence` checks that a model's function computes what npu-ops does.

A model looks up its functions in its own module at each call, so they are replaced there. Up to
5.10 a layer looks up the functions of Gated Delta Net once, when it is built. Attention is
registered under a name: `attn_implementation="npu_ops"`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable

from npu_ops_adapters.patching import Patch
from npu_ops_adapters.transformers import models


def patches() -> Iterable[Patch]:
    """Yield all patches, in the order of their names."""
    for module in pkgutil.iter_modules(__path__):
        found = importlib.import_module(f"{__name__}.{module.name}")
        yield from getattr(found, "patches", tuple)()


def modules() -> list[str]:
    """Return the modules of installed models that would be patched when they are imported."""
    return models.modules()
