"""Finds the modules that hold an object, and replaces it in all of them or in none."""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Mapping
from typing import Any

from npu_ops_adapters.patching.records import Patch

Place = tuple[Any, str]  # a module or class and an attribute's name, or a dict and a key
ABSENT = object()  # stands for a missing attribute


def locate(patch: Patch) -> Place:
    """Return the place of a patch's target. A KeyError names the missing part."""
    *owners, name = patch.attribute.split(".")
    owner = sys.modules[patch.module]
    for part in owners:
        owner = names_of(owner)[part]
    return owner, name


def names_of(owner: Any) -> Mapping[str, Any]:
    """Return the own attributes of a module or class, or the dict itself."""
    return owner if isinstance(owner, dict) else vars(owner)


class Holders:
    """An index of the functions and classes that each module holds, built on first use."""

    @functools.cached_property
    def _ids(self) -> dict[int, tuple[types.ModuleType, set[int]]]:
        """Map each module to the ids of its values.

        The loop over values runs in C (`map`), because there are thousands of modules.
        """
        return {
            id(module): (module, set(map(id, list(vars(module).values()))))
            for module in list(sys.modules.values())
            if isinstance(module, types.ModuleType)
        }

    def of(self, value: Any, name: str) -> list[Place]:
        """Return the modules that hold `value`, each with the name of the attribute.

        A value from torch or builtins counts only under the name `name`: other modules may hold it
        for other purposes.
        """
        # Not isinstance: it may call the object's code, which can warn or import.
        if not issubclass(type(value), (types.FunctionType, type)):
            return []
        home = getattr(value, "__module__", None) or ""
        own = home.partition(".")[0] not in ("", "builtins", "torch")
        return [
            (module, held)
            for module, ids in self._ids.values()
            if id(value) in ids
            for held, x in list(vars(module).items())
            if x is value and (own or held == name)
        ]

    def importers(self, patch: Patch, original: Any, name: str) -> list[Place]:
        """Return the places other than the target that hold a patch's original.

        If the original comes from another framework, packages outside the patch's own framework may
        hold it for other purposes. There it counts only under the name `name`.
        """
        found = self.of(original, name) if patch.rebind else []
        home = getattr(original, "__module__", None) or ""
        own = _framework(patch.module)
        if _framework(home) != own:
            found = [
                (module, held)
                for module, held in found
                if _framework(module.__name__) == own or (held == name and module.__name__ != home)
            ]
        modules = filter(None, map(sys.modules.get, patch.also))
        return found + [(m, name) for m in modules if name in vars(m) and vars(m)[name] is original]

    def replace(self, places: list[Place], old: Any, new: Any) -> None:
        """Set `new` at all places; if one fails, restore `old` at all."""
        done = []
        try:
            for place in places:
                _put(place, new)
                done.append(place)
        except Exception:
            for place in done:
                _put(place, old)
            raise
        for owner, _ in places:
            if isinstance(owner, types.ModuleType):
                self._ids.setdefault(id(owner), (owner, set()))[1].add(id(new))


def _framework(module: str) -> str:
    return module.partition(".")[0]


def _put(place: Place, value: Any) -> None:
    owner, name = place
    if value is ABSENT:
        operator.delitem(owner, name) if isinstance(owner, dict) else delattr(owner, name)
    elif isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)
