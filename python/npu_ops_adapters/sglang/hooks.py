"""Registers npu-ops' replacements as hooks in SGLang's HookRegistry.

The registry only logs failures. So npu-ops checks each hook before a model is loaded, and logs a
warning for each hook that is not in force.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterable, Iterator

import npu_ops_adapters
from npu_ops.core import log
from npu_ops_adapters import patching
from npu_ops_adapters.patching import Patch, State

NAME = "SGLang's HookRegistry"
_MODEL_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
_AT_REST = (State.APPLIED, State.WAITING, State.DISABLED)

_registered: dict[tuple[str, str], tuple[Patch, Callable]] = {}
_logger = logging.getLogger("npu_ops")


def who_applies() -> str:
    """Return `Patch.by`: the registry's name if this SGLang has one, else ""."""
    if "sglang.srt" not in sys.modules:
        return ""
    return NAME if importlib.util.find_spec("sglang.srt.plugins") is not None else ""


def register(patches: Iterable[Patch]) -> None:
    """Register a hook for each patch that the registry applies, and a check before a model loads.

    SGLang applies all hooks later, at once.
    """
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    add, kinds = registry.HookRegistry.register, registry.HookType
    for patch in patches:
        if patch.by and patch.key not in _registered and _is_there(patch):
            _registered[patch.key] = patch, _hook(patch)
            add(_dotted(patch), _registered[patch.key][1], kinds.AROUND)
    add(_MODEL_RUNNER, _check, kinds.BEFORE)
    npu_ops_adapters.apply()


def load_plugins() -> None:
    """Have SGLang load its plugins, if this version has any."""
    if who_applies():
        importlib.import_module("sglang.srt.plugins").load_plugins()


def adopt() -> None:
    """Record in `npu_ops_adapters.patching` which hooks are in place."""
    for patch, hook in _registered.values():
        outermost = _here(patch)
        for wrapper in patching.wrapped(outermost):
            if _is_made_of(wrapper, hook):
                patching.adopt(patch, wrapper.__wrapped__, wrapper)


def _is_there(patch: Patch) -> bool:
    """Return whether a patch can be applied; if not, log why.

    Without this check SGLang's registry would log an exception with a traceback.
    """
    try:
        importlib.import_module(patch.module)
    except ImportError as error:
        log.once(f"{patch.target}: its module does not import: {error}")
        return False
    (row,) = [row for row in patching.plan([patch]) if row.key == patch.key]
    if row.state is State.REFUSED:
        log.once(f"{row.target}: {row.sentence}")
    return row.state is State.LEFT and row.detail == patch.by


def _dotted(patch: Patch) -> str:
    return patch.target.replace(":", ".")


def _hook(patch: Patch) -> Callable:
    made = functools.cache(patch.make)

    def npu_ops_hook(original, *args, **kwargs):
        return made(original)(*args, **kwargs)

    return npu_ops_hook


def _here(patch: Patch) -> Callable | None:
    """Return the current object at a patch's target; None if it is missing or not imported."""
    place = sys.modules.get(patch.module)
    for name in patch.attribute.split("."):
        place = vars(place).get(name) if place is not None else None
    return place


def _is_made_of(wrapper: Callable, hook: Callable) -> bool:
    cells: Iterator = (cell.cell_contents for cell in getattr(wrapper, "__closure__", None) or ())
    return any(content is hook for content in cells)


def _check(*args, **kwargs) -> None:
    """Log which hooks are active in this process. Runs before a model is built."""
    rows = {row.key: row for row in (*npu_ops_adapters.plan(), *npu_ops_adapters.verify())}
    ours = [row for row in rows.values() if row.target.startswith("sglang.")]
    applied = [row for row in ours if row.state is State.APPLIED]
    _logger.info("npu-ops in SGLang: %d of %d hooks in force", len(applied), len(ours))
    for row in ours:
        if row.state not in _AT_REST:
            log.once(f"npu-ops in SGLang: {row.target} is not in force: {row.sentence}")
