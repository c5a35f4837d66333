"""Tells why a target cannot be replaced; compares signatures and names objects for messages."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from npu_ops_adapters.patching.holders import locate, names_of
from npu_ops_adapters.patching.records import Names, Patch


def why_not(patch: Patch) -> str | None:
    """Return None, or why the patch's target cannot be replaced."""
    try:
        owner, name = locate(patch)
        names = names_of(owner)
        if patch.optional and name not in names:
            return _asked(patch, None)
        original = names[name]
    except KeyError as missing:
        return f"{patch.module} has no {missing.args[0]}; it was there in {patch.versions}"
    return mismatch(patch, original)


def mismatch(patch: Patch, original: Any) -> str | None:
    """Return None, or how `original` differs from the known signatures."""
    if not patch.signatures:
        return _asked(patch, original)
    found = parameters(original)
    if found in patch.signatures:
        return _asked(patch, original)
    expected = " or ".join(_shown(names) for names in patch.signatures)
    return f"expected {expected} ({patch.versions}), got {_shown(found)} of {whose(original)}"


def _asked(patch: Patch, original: Any) -> str | None:
    try:
        return patch.why_not(original) if patch.why_not else None
    except Exception as error:  # the framework lacks something that why_not reads
        return cannot(error)


def whose(value: Any) -> str:
    """Return the full name of a function, or of the type of any other value."""
    module = getattr(value, "__module__", None) or type(value).__module__
    return f"{module}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def is_ours(value: Any) -> bool:
    """Return whether an adapter made `value`, whichever patch it belongs to.

    MindSpeed may set such a function at another place.
    """
    return (getattr(value, "__module__", None) or "").startswith("npu_ops_adapters.")


def wrapped(function: Any) -> Iterator[Any]:
    """Yield a function and the functions it wraps, from the outside in."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def cannot(error: Exception) -> str:
    """Return the reason for a patch whose replacement could not be made or set."""
    return f"npu-ops cannot create the replacement: {type(error).__name__}: {error}"


def parameters(function: Any) -> Names | None:
    """Return a function's parameter names, in the form of `Patch.signatures`."""
    if function is None:
        return None
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # not callable, or built in
        return ("?",)


def _shown(names: Names | None) -> str:
    return "None" if names is None else f"({', '.join(names)})"
