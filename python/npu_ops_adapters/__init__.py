"""Puts npu-ops into the frameworks: what would be replaced, do it, is it still so, undo it.

Nothing needs to be called: `import torch` installs a hook that applies the adapters as a framework
is imported (`npu_ops_autoload`). By hand, before or after the framework is imported:

    import npu_ops_adapters
    npu_ops_adapters.apply()

Every folder here is a framework. Its `patches()` says what is replaced and why.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

import npu_ops_autoload

from npu_ops_adapters import patching
from npu_ops_adapters.patching import Patch, Status

__all__ = ["Patch", "Status", "apply", "patches", "plan", "revert", "verify"]


def patches() -> list[Patch]:
    """What the adapters of all frameworks would replace, in the order they do."""
    return [patch for framework in _frameworks() for patch in framework.patches()]


def plan() -> list[Status]:
    """What `apply` would do. `state` is "apply", "applied", "module not imported yet",
    "disabled by NPU_OPS_DISABLE", "refused: " and a sentence, or "left to " a framework's registry.
    """
    _adopt()
    return patching.plan(patches())


def apply() -> list[Status]:
    """Apply what can be applied now, and the rest when its module is imported. Once is enough.

    Returns:
        As `plan`, afterwards. A refusal is also logged, once; the other patches are not affected.
    """
    npu_ops_autoload.watch()
    _adopt()
    return patching.apply(patches())


def verify() -> list[Status]:
    """Whether each applied patch is still in place. `state` is "applied", "overwritten by ..." or
    "captured too early by ...": modules that still hold what was replaced.
    """
    _adopt()
    return patching.verify()


def revert() -> list[Status]:
    """Put back every object that was replaced, and stop watching imports.

    Returns:
        One row for each patch: "reverted", or "overwritten by ..." where someone else's replacement
        was left in place.
    """
    npu_ops_autoload.unwatch()
    _adopt()
    return patching.revert()


def load_plugins() -> None:
    """Have the frameworks that load us as a plugin do so, as they do when they start."""
    for framework in _frameworks():
        getattr(framework, "load_plugins", lambda: None)()


def imported(module: str) -> None:
    """Called by the import hook when `module` has just run, for the first time or again."""
    patching.forget(module)
    patching.apply(patches(), ready=module)


def _frameworks() -> list[ModuleType]:
    return [
        importlib.import_module(module.name)
        for module in pkgutil.iter_modules(__path__, f"{__name__}.")
        if module.ispkg
    ]


def _adopt() -> None:
    """Look for what frameworks have applied in our place."""
    for framework in _frameworks():
        getattr(framework, "adopt", lambda: None)()
