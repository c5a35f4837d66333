"""Installs npu-ops into training and serving frameworks: plan, apply, verify and revert patches.

Usually no call is needed: `import torch` installs a hook that applies the patches of a framework
when it is imported (`npu_ops_autoload`). To do it by hand, before or after the framework is
imported:

    import npu_ops_adapters
    npu_ops_adapters.apply()

Every folder here except `patching` is a framework. Its `patches()` lists what is replaced and why.
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
    """Return the patches of all frameworks, in the order in which they are applied."""
    return [patch for framework in _frameworks() for patch in framework.patches()]


def modules() -> frozenset[str]:
    """Return the modules that patches may target, also those of frameworks not imported yet."""
    found = [getattr(framework, "modules", list)() for framework in _frameworks()]
    return npu_ops_import_hook.WATCHED.union(*found)


def plan() -> Statuses:
    """Return what `apply` would do with each patch, as a list that prints as a table.

    The `state` of a row is READY, APPLIED, WAITING (its module is not imported), DISABLED, REFUSED,
    KEPT or LEFT (to a framework's registry); see `npu_ops_adapters.patching`.
    """
    _adopt()
    return patching.plan(patches())


def apply() -> Statuses:
    """Apply each patch now, or when its module is imported. One call is enough.

    Returns:
        The states after applying, as in `plan`. A refused patch is logged once; the others still
        apply.
    """
    npu_ops_import_hook.watch(imported, awaited)
    _adopt()
    return patching.apply(patches())


def verify() -> Statuses:
    """Check whether each applied patch is still in place.

    The `state` of a row is APPLIED; OVERWRITTEN, with the current object in `detail`; or CAPTURED,
    with the modules in `detail` that still hold the replaced object.
    """
    _adopt()
    return patching.verify()


def revert() -> Statuses:
    """Restore every replaced object, and stop watching imports.

    Returns:
        One row per patch: REVERTED, or OVERWRITTEN if other code has replaced the object since;
        that replacement stays.
    """
    npu_ops_import_hook.unwatch()
    _adopt()
    return patching.revert()


def load_plugins() -> None:
    """Let frameworks that load npu-ops as a plugin at startup load it now."""
    for framework in _frameworks():
        getattr(framework, "load_plugins", lambda: None)()


def imported(module: str) -> None:
    """Apply the patches of `module`. The import hook calls this after each execution of it."""
    patching.forget(module)
    patching.apply(patches(), ready=module)


def awaited(module: str) -> None:
    """Tell frameworks that `module` is about to be executed. The import hook calls this."""
    for framework in _frameworks():
        getattr(framework, "awaited", lambda module: None)(module)


def _frameworks() -> list[ModuleType]:
    return [
        importlib.import_module(module.name)
        for module in pkgutil.iter_modules(__path__, f"{__name__}.")
        if module.ispkg and module.name != patching.__name__
    ]


def _adopt() -> None:
    """Record the patches that a framework's own registry has applied for npu-ops."""
    for framework in _frameworks():
        getattr(framework, "adopt", lambda: None)()
