"""Imports MindSpeed before Megatron-LM, and passes the arguments of slime's run to it."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable

from npu_ops.core import env, log
from npu_ops_adapters.patching import Patch

_VERSIONS = "slime v0.2.2 and 624b824a with their MindSpeed"
_OP = "slime_mindspeed"
_ADAPTOR = "mindspeed.megatron_adaptor"
_REGISTRY = "mindspeed.patch_utils"
_FLA = "fla.ops.gated_delta_rule.chunk_gated_delta_rule"


def patches() -> Iterable[Patch]:
    """Patch functions that slime calls before it builds a model."""
    yield Patch(
        target="slime.backends.megatron_utils.initialize:init",
        op=_OP,
        make=_repatch_after,
        why="MindSpeed chooses its features by the arguments of the run",
        signatures=(("args",),),
        versions=_VERSIONS,
        remove_when="slime passes its arguments to MindSpeed",
    )
    yield Patch(
        target="slime_plugins.models.qwen_gdn_backend:get_chunk_gated_delta_rule",
        op="chunk_gated_delta_rule",
        make=_as_fla_has_it,
        why="MindSpeed replaces fla's function with its own kernel, which takes only bf16",
        signatures=(("backend",),),
        versions=_VERSIONS,
        remove_when="MindSpeed leaves fla's function in place",
    )


def import_first() -> None:
    """Import MindSpeed unless it is imported, because slime is about to import Megatron-LM."""
    if _ADAPTOR in sys.modules or not env.settings.disable.isdisjoint(("all", _OP)):
        return
    if importlib.util.find_spec("mindspeed") is None:
        log.once("slime: MindSpeed is not installed; Megatron-LM needs it on NPUs")
        return
    if "megatron.core" in sys.modules:
        log.once("slime: Megatron-LM was imported before MindSpeed, which may patch too late")
    importlib.import_module(_ADAPTOR)


def _repatch_after(original: Callable) -> Callable:
    @functools.wraps(original)
    def npu_ops_init(args):
        result = original(args)
        if _ADAPTOR in sys.modules:
            sys.modules[_ADAPTOR].repatch(vars(args))
        return result

    return npu_ops_init


def _as_fla_has_it(original: Callable) -> Callable:
    @functools.wraps(original)
    def npu_ops_get(backend):
        found = original(backend)
        manager = getattr(sys.modules.get(_REGISTRY), "MindSpeedPatchesManager", None)
        placed = manager and manager.patches_info.get(_FLA)
        if placed is None or found is not placed.final_patch_func:
            return found
        own = placed.orig_func  # without fla it is a function that raises
        return own if getattr(own, "__module__", "").startswith("fla.") else found

    return npu_ops_get
