"""`jit_fuser`: leaves the functions that it would hand to torch.compile as they are.

Each of them would need an inductor backend and a C++ toolchain on the NPU, and is compiled again
for new shapes. Functions decorated before us are replaced by what was decorated, wherever modules
hold them. Configs built before that still hold the compiled ones: build them afterwards.
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


def _unwrap(compiled):
    """The function that was decorated, as the static or class method that it was."""
    original = _function(compiled)._torchdynamo_orig_callable
    _note(original)
    return original if type(compiled) is types.FunctionType else type(compiled)(original)


def _note(function: Callable) -> None:
    _uncompiled.add(f"{function.__module__}.{function.__qualname__}")


def _decorated() -> Iterable[str]:
    """The targets that jit_fuser has decorated, in the modules and classes that define them."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "megatron" and isinstance(module, types.ModuleType):
            for attribute, value in list(vars(module).items()):
                if _is_decorated(value) and value.__module__ == name:
                    yield f"{name}:{attribute}"
                elif issubclass(type(value), type) and value.__module__ == name:
                    for method, raw in list(vars(value).items()):
                        if _is_decorated(raw):
                            yield f"{name}:{attribute}.{method}"


def _is_decorated(value) -> bool:
    function = _function(value)
    if type(function) is not types.FunctionType:
        return False
    marks = vars(function)
    return (
        "_torchdynamo_orig_callable" in marks
        and "_torchdynamo_disable" not in marks  # torch.compiler.disable
        and marks.get("_torchdynamo_wrapper_id", id(function)) == id(function)  # copied marks
        and _by_jit_fuser(marks["_torchdynamo_orig_callable"])
    )


def _by_jit_fuser(original: Callable) -> bool:
    """Whether its source says @jit_fuser: what says @torch.compile is meant to be compiled."""
    try:
        source = inspect.getsource(original)
    except (OSError, TypeError):
        return hasattr(sys.modules.get(original.__module__), "jit_fuser")
    return re.match(r"(\s*@.*\n)*?\s*@(\w+\.)*jit_fuser\b", source) is not None


def _function(value):
    return value.__func__ if type(value) in (staticmethod, classmethod) else value
