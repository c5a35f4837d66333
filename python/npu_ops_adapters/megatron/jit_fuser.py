"""`jit_fuser`: leaves the functions that it would hand to torch.compile as they are.

Each of them would need an inductor backend and a C++ toolchain on the NPU, and is compiled again
for new shapes. Functions decorated before us are replaced by what was decorated, wherever modules
hold them, also where MindSpeed has put a decorator in torch.compile's place that does not compile:
what it makes has no signature. Configs built before that still hold the compiled ones: build them
afterwards.
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
    """The functions kept from torch.compile so far, "module.qualified name"."""
    return sorted(_uncompiled)


def patches() -> Iterable[Patch]:
    """`jit_fuser` itself, and each function that it has decorated already."""
    yield Patch(
        target="megatron.core.jit:jit_fuser",
        op="jit_fuser",
        make=_replace,
        why=_WHY,
        signatures=(),  # torch.compile, a no-op or another adapter's: a decorator all the same
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
    """The function that was decorated, as the static or class method that it was."""
    original = _original(decorated)
    _note(original)
    kind = type(decorated)
    return original if kind is types.FunctionType else kind(original)


def _note(function: Callable) -> None:
    _uncompiled.add(f"{function.__module__}.{function.__qualname__}")


def _decorated() -> Iterable[str]:
    """The targets that jit_fuser has decorated, in the modules and classes that define them."""
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
    """What jit_fuser was given to make this of; None: it did not."""
    function = value.__func__ if type(value) in (staticmethod, classmethod) else value
    if type(function) is not types.FunctionType:
        return None
    original = _compiled_from(function) or _passed_on_to(function)
    return original if original is not None and _by_jit_fuser(original) else None


def _compiled_from(function: types.FunctionType) -> Callable | None:
    """What torch.compile was given."""
    marks = vars(function)
    is_compiled = (
        "_torchdynamo_disable" not in marks  # torch.compiler.disable
        and marks.get("_torchdynamo_wrapper_id", id(function)) == id(function)  # copied marks
    )
    return marks.get("_torchdynamo_orig_callable") if is_compiled else None


def _passed_on_to(function: types.FunctionType) -> Callable | None:
    """What MindSpeed's decorator was given: the one argument, which its wrapper calls."""
    if not function.__qualname__.startswith("dummy_compile.<locals>."):
        return None
    held = inspect.getclosurevars(function).nonlocals.get("args", ())
    original = held[0] if len(held) == 1 else None
    return original if type(original) is types.FunctionType else None


def _by_jit_fuser(original: Callable) -> bool:
    """Whether its source says @jit_fuser: what says @torch.compile is meant to be compiled."""
    try:
        source = inspect.getsource(original)
    except (OSError, TypeError):
        return hasattr(sys.modules.get(original.__module__), "jit_fuser")
    return re.match(r"(\s*@.*\n)*?\s*@(\w+\.)*jit_fuser\b", source) is not None
