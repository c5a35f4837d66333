"""SGLang 0.5.9 to 0.5.23: one file for each op, each with its `patches()`.

From 0.5.11 on SGLang asks for plugins as each of its processes starts: `register` hands it the
functions, as hooks, so that those of other plugins still work. Earlier versions, and the tables
that are no functions, are patched as their modules are imported. A model that is built already
keeps what it has.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable

from npu_ops_adapters.patching import Patch

_SHARED = ("functions", "hooks")


def patches() -> Iterable[Patch]:
    """Return the patches of all modules here, in the order of the modules' names."""
    for module in pkgutil.iter_modules(__path__):
        if module.name not in _SHARED:
            yield from importlib.import_module(f"{__name__}.{module.name}").patches()


def register() -> None:
    """The entry point of the group sglang.srt.plugins: give SGLang its hooks."""
    _hooks().register(patches())


def load_plugins() -> None:
    """Do what SGLang does as one of its processes starts. Before 0.5.11 it does nothing."""
    _hooks().load_plugins()


def adopt() -> None:
    """Tell the engine which hooks SGLang has applied."""
    _hooks().adopt()


def _hooks():
    """The module that speaks to SGLang's registry."""
    return importlib.import_module(f"{__name__}.hooks")
