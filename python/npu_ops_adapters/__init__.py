"""Puts npu-ops into the frameworks: what would be replaced, do it, is it still so, undo it.

Nothing needs to be called: `import torch` installs a hook that applies the adapters as a framework
is imported (`npu_ops_autoload`). By hand, before or after the framework is imported:

    import npu_ops_adapters
    npu_ops_adapters.apply()

Every folder here but `patching` is a framework. Its `patches()` says what is replaced and why.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

import npu_ops_import_hook

from npu_ops.core import env
from npu_ops_adapters import patching
from npu_ops_adapters.patching import Patch, State, Status, Statuses
from npu_ops_adapters.patching.records import known

__all__ = ["Patch", "State", "Status", "apply", "patches", "plan", "revert", "verify"]


for _name in sorted(env.settings.disable - {"all"}):
    known(_name, "NPU_OPS_DISABLE")


def patches() -> list[Patch]:
    """What the adapters of all frameworks would replace, in the order they do."""
    return [patch for framework in _frameworks() for patch in framework.patches()]


def modules() -> frozenset[str]:
    """The modules that can be patched, of whatever is installed: importing them shows how."""
    found = [getattr(framework, "modules", list)() for framework in _frameworks()]
    return npu_ops_import_hook.WATCHED.union(*found)


def plan() -> Statuses:
    """What `apply` would do with each patch: a list that prints as a table.

    A row's `state` is READY, APPLIED, WAITING for its module, DISABLED, REFUSED or LEFT to a
    framework's registry; see `npu_ops_adapters.patching`.
    """
    _adopt()
    return patching.plan(patches())


def apply() -> Statuses:
    """Apply what can be applied now, and the rest when its module is imported. Once is enough.

    Returns:
        As `plan`, afterwards. A refusal is also logged, once; the other patches are not affected.
    """
    npu_ops_import_hook.watch(imported, awaited)
    _adopt()
    return patching.apply(patches())


def verify() -> Statuses:
    """Whether each applied patch is still in place.

    A row's `state` is APPLIED, OVERWRITTEN, with what is there now as its `detail`, or CAPTURED by
    the modules in its `detail`, which still hold what was replaced.
    """
    _adopt()
    return patching.verify()


def revert() -> Statuses:
    """Put back every object that was replaced, and stop watching imports.

    Returns:
        One row for each patch: REVERTED, or OVERWRITTEN where someone else's replacement was left
        in place.
    """
    npu_ops_import_hook.unwatch()
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


def awaited(module: str) -> None:
    """Called by the import hook when `module` is about to run."""
    for framework in _frameworks():
        getattr(framework, "awaited", lambda module: None)(module)


def _frameworks() -> list[ModuleType]:
    return [
        importlib.import_module(module.name)
        for module in pkgutil.iter_modules(__path__, f"{__name__}.")
        if module.ispkg and module.name != patching.__name__
    ]


def _adopt() -> None:
    """Look for what frameworks have applied in our place."""
    for framework in _frameworks():
        getattr(framework, "adopt", lambda: None)()
