"""Adapters for SGLang 0.5.9 to 0.5.23: one file for each op, each with its `patches()`.

From 0.5.11 on SGLang loads plugins when one of its processes starts. Then `register` registers the
replacements as hooks, so hooks of other plugins still work. For earlier versions, and for targets
that are not functions, the modules are patched when they are imported. A model that is already
built is not changed.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable

from npu_ops_adapters.patching import Patch

_SHARED = ("functions", "hooks")


def patches() -> Iterable[Patch]:
    """Yield the patches of all modules in this package, in the order of the modules' names."""
    for module in pkgutil.iter_modules(__path__):
        if module.name not in _SHARED:
            yield from importlib.import_module(f"{__name__}.{module.name}").patches()


def register() -> None:
    """Register the hooks. SGLang calls this as an entry point of the group sglang.srt.plugins."""
    _hooks().register(patches())


def load_plugins() -> None:
    """Load plugins as SGLang does when one of its processes starts. Before 0.5.11 do nothing."""
    _hooks().load_plugins()


def adopt() -> None:
    """Record in `npu_ops_adapters.patching` which hooks SGLang has applied."""
    _hooks().adopt()


def _hooks():
    """Return the module that works with SGLang's registry."""
    return importlib.import_module(f"{__name__}.hooks")
