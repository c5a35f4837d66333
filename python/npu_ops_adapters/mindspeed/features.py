"""A MindSpeedFeature: lets MindSpeed's patch manager apply npu-ops' patches with its own.

The manager overwrites patches that bypass it, and `repatch` forgets patches that are registered
with the manager directly. But `repatch` asks each feature again for its patches. npu-ops appends
its feature to the list of features just before MindSpeed uses the list, in case a program has
replaced it. The feature registers wrappers, which the manager puts around MindSpeed's functions. So
calls that npu-ops does not support run MindSpeed's functions. When MindSpeed removes its patches,
npu-ops applies the patches of its Megatron adapter again.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import npu_ops_adapters
from npu_ops.core import env, log
from npu_ops_adapters import patching
from npu_ops_adapters.megatron import attention as megatron_attention
from npu_ops_adapters.megatron import bias_dropout_add
from npu_ops_adapters.megatron import experts as megatron_experts
from npu_ops_adapters.megatron import mrope as megatron_mrope
from npu_ops_adapters.megatron import rope as megatron_rope
from npu_ops_adapters.mindspeed import VERSIONS, arguments, attention, rope
from npu_ops_adapters.patching import Patch

# From core_r0.18 on, MegatronAdaptor has its own list; MindSpeed may use the same one.
_MANAGERS = {
    "mindspeed.features_manager.features_manager": "MindSpeedFeaturesManager",
    "megatron_adaptor.features_manager.features_manager": "FeaturesManager",
}
_BASES = {
    "mindspeed.features_manager.feature": "MindSpeedFeature",
    "megatron_adaptor.features_manager.mindspeed_feature": "MindSpeedFeature",
}
_REGISTRY = "mindspeed.patch_utils"
_ARGUMENTS = "mindspeed.args_utils"
_USES = ("apply_features_pre_patches", "apply_features_patches")

_features: list[Any] = []  # npu-ops' feature, once its base class exists
_registries: list[Any] = []  # patch managers that the feature was registered with
_wrappers: dict[tuple[str, str], Callable] = {}


def patches() -> Iterable[Patch]:
    """Patch the methods that use the list of features, and those that remove patches."""
    for module, name in _MANAGERS.items():
        manager = _manager(module)
        for method in _USES:
            if manager is None or method in vars(manager):  # otherwise the base class defines it
                yield _patch(
                    f"{module}:{name}.{method}",
                    _replace_use,
                    "programs replace the list of features, which would drop npu-ops' feature",
                    joined=_join_late if method == _USES[1] else None,
                    left=_leave if method == _USES[1] else None,
                )
    yield _patch(
        f"{_REGISTRY}:MindSpeedPatchesManager.remove_patches",
        _replace_remove,
        "when MindSpeed's patches go, the patches of the Megatron adapter must come back",
    )


def _manager(module: str) -> type | None:
    return getattr(sys.modules.get(module), _MANAGERS[module], None)


def covered() -> list[Patch]:
    """Return the patches that MindSpeed's manager applies for npu-ops.

    They cover the targets that the manager patches or may patch. The slots of Megatron's fused rope
    are excluded: with MindSpeed nothing calls them.
    """
    modules = (megatron_attention, bias_dropout_add, megatron_mrope, megatron_rope)
    found = [patch for module in modules for patch in module.patches() if patch.rebind]
    sums = [megatron_experts.unpermute()] if env.settings.consistent else []
    return [*map(rope.scaled, found), attention.forward(), rope.dispatcher(), *sums]


def _patch(target: str, make: Callable, why: str, **changes) -> Patch:
    return Patch(
        target=target,
        op="mindspeed",
        make=make,
        why=why,
        signatures=(),  # not checked: class and static methods cannot be inspected
        versions=VERSIONS,
        remove_when="MindSpeed loads features of other packages",
        **changes,
    )


def _replace_use(original: classmethod) -> classmethod:
    use = original.__func__

    @functools.wraps(use, assigned=(), updated=())
    def npu_ops_use(cls, args, *more, **options):
        with _only_said("is not among MindSpeed's features"):
            args = arguments.complete(args, cls.FEATURES_LIST)
            _join(cls)
            patching.hand_over(covered())
        result = use(cls, args, *more, **options)
        with _only_said("has not restored all of its patches"):
            patching.renew(npu_ops_adapters.patches())
        return result

    return classmethod(npu_ops_use)


def _replace_remove(original: staticmethod) -> staticmethod:
    remove = original.__func__

    @functools.wraps(remove, assigned=(), updated=())
    def npu_ops_remove(*args, **kwargs):
        result = remove(*args, **kwargs)
        with _only_said("has not restored its patches of Megatron"):
            patching.take_back()
            npu_ops_adapters.apply()
        return result

    return type(original)(npu_ops_remove)


@contextlib.contextmanager
def _only_said(consequence: str) -> Iterator[None]:
    """Log an error in npu-ops' code instead of raising it into MindSpeed."""
    try:
        yield
    except Exception as error:
        log.once(f"npu-ops {consequence}: {type(error).__name__}: {error}")


def _join(manager: type) -> None:
    """Put npu-ops' feature last: wrappers registered last are outermost."""
    features = manager.FEATURES_LIST
    ours = _feature()
    if ours in features:
        features.remove(ours)
        features.append(ours)
    elif hasattr(manager, "add_feature"):
        manager.add_feature(ours)
    else:
        features.append(ours)


def _join_late() -> None:
    """If MindSpeed's patches are already applied, add npu-ops' patches to them."""
    manager = next(filter(None, map(_manager, _MANAGERS)))
    registry = getattr(sys.modules.get(_REGISTRY), "MindSpeedPatchesManager", None)
    if registry and any(patch.is_applied for patch in registry.patches_info.values()):
        of_this_process = getattr(sys.modules.get(_ARGUMENTS), "get_full_args", None)
        if of_this_process:
            arguments.complete(of_this_process(), manager.FEATURES_LIST)
        _join(manager)
        patching.hand_over(covered())
        _feature().register_patches(registry, None)
        registry.apply_patches()


def _leave() -> None:
    """Remove npu-ops' feature from the lists, and its wrappers from the registries."""
    for manager in filter(None, map(_manager, _MANAGERS)):
        if _features and _features[0] in manager.FEATURES_LIST:
            manager.FEATURES_LIST.remove(_features[0])
    for registry in _registries:
        for target, patch in list(registry.patches_info.items()):
            _forget(registry, target, patch)
    _registries.clear()


def _forget(registry, target: str, patch) -> None:
    """Remove npu-ops' wrappers from a registered patch. The target itself is already restored.

    MindSpeed compares a target with `final_patch_func`, the last function it applied, so that is
    set to the current function.
    """
    theirs = [wrapper for wrapper in patch.wrappers if wrapper not in _wrappers.values()]
    if len(theirs) == len(patch.wrappers):
        return
    patch.wrappers[:] = theirs
    if theirs or patch.patch_func is not None:
        patch.final_patch_func = getattr(patch.orig_module, patch.orig_func_name, None)
    else:
        del registry.patches_info[target]


def _feature() -> Any:
    """Return npu-ops' feature: always the same object, so it can be found in MindSpeed's lists."""
    if not _features:
        base = next(vars(sys.modules[m])[name] for m, name in _BASES.items() if m in sys.modules)
        _features.append(_class(base)())
    return _features[0]


def _class(base: type) -> type:
    class NpuOpsFeature(base):
        """npu-ops as the last layer over MindSpeed's features; NPU_OPS_DISABLE excludes ops."""

        def __init__(self):
            super().__init__("npu-ops", optimization_level=0)

        def is_need_apply(self, args):
            return True

        def register_patches(self, patch_manager, args):
            with _only_said("is not among MindSpeed's patches"):
                _register(patch_manager)

    return NpuOpsFeature


def _register(registry) -> None:
    if registry not in _registries:
        _registries.append(registry)
    for patch in covered():
        if _exists(patch):  # the manager would create a missing target
            registry.register_patch(patch.target.replace(":", "."), _wrapper(patch))


def _exists(patch: Patch) -> bool:
    try:
        owner = importlib.import_module(patch.module)
        for part in patch.attribute.split("."):
            owner = getattr(owner, part)
    except Exception as error:  # a module of Megatron may fail to import
        log.once(f"{patch.target}: npu-ops left it out of MindSpeed's patches: {error}")
        return False
    return True


def _wrapper(patch: Patch) -> Callable:
    """Return the wrapper that MindSpeed registers for a patch; always the same object.

    MindSpeed compares wrappers by identity, and treats a function as a wrapper if its name contains
    "wrapper".
    """

    def npu_ops_wrapper(function):
        return patching.place(patch, function)

    npu_ops_wrapper.__name__ = f"npu_ops_{patch.op}_wrapper"
    return _wrappers.setdefault(patch.key, npu_ops_wrapper)
