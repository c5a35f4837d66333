"""`jit_fuser`: returns functions unchanged instead of passing them to torch.compile.

On an NPU, torch.compile needs an inductor backend and a C++ toolchain, and compiles again for new
shapes. Functions that were decorated before this patch are replaced by their originals, in every
module that holds them. This includes functions decorated by MindSpeed's substitute for
torch.compile, which does not compile but hides the signature. Configs that were built before still
hold the compiled functions, so build configs afterwards.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections.abc import Callable, Iterable

from npu_ops_adapters.patching import Patch

_WHY = "torch.compile fails or recompiles on NPUs; these functions are small"
_REMOVE = "torch.compile works on NPUs for them, forward and backward"
_VERSIONS = "Megatron-Core 0.12 to 0.19"

_uncompiled: set[str] = set()


def uncompiled() -> list[str]:
    """Return the functions kept from torch.compile so far, as "module.qualified name"."""
    return sorted(_uncompiled)


def patches() -> Iterable[Patch]:
    """Patch `jit_fuser` itself, and each function that it has already decorated."""
    yield Patch(
        target="megatron.core.jit:jit_fuser",
        op="jit_fuser",
        make=_replace,
        why=_WHY,
        signatures=(),  # not checked: torch.compile, a no-op or another adapter's decorator
        versions=_VERSIONS,
        remove_when=_REMOVE,
        note=lambda: f"{len(_uncompiled)} functions left uncompiled",
    )
    for target in _decorated():
        yield Patch(
            target=target,
            op="jit_fuser",
            make=_unwrap,
            why=_WHY,
            signatures=(),
            versions=_VERSIONS,
            remove_when=_REMOVE,
        )


def _replace(original: Callable) -> Callable:
    def npu_ops_leave_uncompiled(function=None, **options):
        if function is None:  # used as @jit_fuser(...)
            return npu_ops_leave_uncompiled
        _note(function)
        return function

    return npu_ops_leave_uncompiled


def _unwrap(decorated):
    """Return the original of a decorated function, as a static or class method if it was one."""
    original = _original(decorated)
    _note(original)
    kind = type(decorated)
    return original if kind is types.FunctionType else kind(original)


def _note(function: Callable) -> None:
    _uncompiled.add(f"{function.__module__}.{function.__qualname__}")


def _decorated() -> Iterable[str]:
    """Yield the targets that jit_fuser has decorated, in the module or class that defines them."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "megatron" and isinstance(module, types.ModuleType):
            for attribute, value in list(vars(module).items()):
                original = _original(value)
                if original is not None and original.__module__ == name:
                    yield f"{name}:{attribute}"
                elif issubclass(type(value), type) and value.__module__ == name:
                    for method, raw in list(vars(value).items()):
                        if _original(raw) is not None:
                            yield f"{name}:{attribute}.{method}"


def _original(value) -> Callable | None:
    """Return the function that jit_fuser decorated to get `value`; None if it did not."""
    function = value.__func__ if type(value) in (staticmethod, classmethod) else value
    if type(function) is not types.FunctionType:
        return None
    original = _compiled_from(function) or _passed_on_to(function)
    return original if original is not None and _by_jit_fuser(original) else None


def _compiled_from(function: types.FunctionType) -> Callable | None:
    """Return the function that torch.compile was given, or None."""
    marks = vars(function)
    is_compiled = (
        "_torchdynamo_disable" not in marks  # set by torch.compiler.disable
        # functools.wraps copies marks; the id tells whether they are this function's own
        and marks.get("_torchdynamo_wrapper_id", id(function)) == id(function)
    )
    return marks.get("_torchdynamo_orig_callable") if is_compiled else None


def _passed_on_to(function: types.FunctionType) -> Callable | None:
    """Return the function that MindSpeed's substitute for torch.compile wraps, or None.

    The substitute's wrapper holds the decorator's arguments in a closure.
    """
    if not function.__qualname__.startswith("dummy_compile.<locals>."):
        return None
    held = inspect.getclosurevars(function).nonlocals.get("args", ())
    original = held[0] if len(held) == 1 else None
    return original if type(original) is types.FunctionType else None


def _by_jit_fuser(original: Callable) -> bool:
    """Return whether the source has @jit_fuser. Functions with only @torch.compile stay compiled.

    If the source is not available, return whether the function's module has the name `jit_fuser`.
    """
    try:
        source = inspect.getsource(original)
    except (OSError, TypeError):
        return hasattr(sys.modules.get(original.__module__), "jit_fuser")
    return re.match(r"(\s*@.*\n)*?\s*@(\w+\.)*jit_fuser\b", source) is not None
