"""Replacing a framework's functions: a patch is data, which one engine applies, checks and undoes.

What a patch replaces is looked up in its module, compared with the signatures that are known, and
only then touched. Modules that imported the same object by value are given the replacement too.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from npu_ops.core import env, log

Names = tuple[str, ...]
Place = tuple[Any, str]  # a module or class and the name of its attribute, or a dict and a key


@dataclasses.dataclass(frozen=True)
class Patch:
    """One replacement.

    target: "module:attribute", "module:Class.attribute" or "module:dict.key", dots going further
        in.
    op: what NPU_OPS_DISABLE calls it.
    make: called with what is there; returns what takes its place, and falls through to it.
    why: why the framework's own will not do.
    signatures: the names of the parameters in every version known; None among them: the attribute
        may be None. Empty: anything is replaced.
    versions: of the framework, that it was tested with.
    remove_when: when this patch can go.
    rebind: replace it also in modules that imported it by value.
    optional: the attribute or key may not be there; `make` is given None, and revert deletes it.
    also: modules that import it by value, for what cannot be recognised there: None or a bool.
    note: says more of an applied patch, e.g. a count.
    by: who applies it in this engine's place, and tells it by `adopt`; "" is the engine.
    joined, left: called once it is applied, and once it is reverted.
    """

    target: str
    op: str
    make: Callable[[Any], Any]
    why: str
    signatures: tuple[Names | None, ...]
    versions: str
    remove_when: str
    rebind: bool = True
    optional: bool = False
    also: Names = ()
    note: Callable[[], str] | None = None
    by: str = ""
    joined: Callable[[], None] | None = None
    left: Callable[[], None] | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.target, self.op

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def attribute(self) -> str:
        return self.target.partition(":")[2]


@dataclasses.dataclass(frozen=True)
class Status:
    """Where one patch stands; see `npu_ops_adapters.plan`, `verify` and `revert`."""

    target: str
    op: str
    state: str
    note: str = ""


@dataclasses.dataclass(eq=False)
class _Applied:
    patch: Patch
    owner: Any
    name: str
    original: Any
    replacement: Any
    had: list[Place]  # who held the replacement before
    stale: bool = False  # its module ran again, so it has new attributes

    def here(self) -> Any:
        return _names(self.owner).get(self.name)

    def status(self, state: str) -> Status:
        note = self.patch.note() if self.patch.note else ""
        return Status(self.patch.target, self.patch.op, state, note)


_ABSENT = object()  # in place of an attribute that is not there
_applied: list[_Applied] = []
_handed_over: dict[tuple[str, str], Patch] = {}  # to a framework's own patch manager
_lock = threading.RLock()  # modules may be imported by several threads


def plan(patches: Iterable[Patch], ready: str | None = None) -> list[Status]:
    """What `apply` would do with each, and what is applied."""
    with _lock:
        patches = {patch.key: patch for patch in patches}
        rows = [_planned(patch, ready) for patch in patches.values()]
        return rows + [
            applied.status("applied") for applied in _live() if applied.patch.key not in patches
        ]


def apply(patches: Iterable[Patch], ready: str | None = None) -> list[Status]:
    """Apply those that are not, in order; a refused one does not keep the others from it.

    ready: a module that has run, though Python still marks it as being imported.
    """
    with _lock:
        patches, holders = list(patches), _Holders()
        refused = {}
        for patch in patches:
            row = _planned(patch, ready)
            if row.state == "apply":
                row = _try(patch, holders)
            if row.state.startswith("refused"):
                refused[patch.key] = row
                log.once(f"{patch.target}: {row.state}")
        return [refused.get((row.target, row.op), row) for row in plan(patches, ready)]


def verify() -> list[Status]:
    """Whether what was replaced still is."""
    with _lock:
        holders = _Holders()
        top = {(id(applied.owner), applied.name): applied for applied in _live()}
        return [
            applied.status(_verified(applied, top[id(applied.owner), applied.name], holders))
            for applied in _live()
        ]


def revert() -> list[Status]:
    """Put everything back, the last first."""
    with _lock:
        holders = _Holders()
        _handed_over.clear()
        rows = []
        while _applied:
            applied = _applied.pop()
            rows.append(_revert(applied, holders))
            if applied.patch.left:
                applied.patch.left()
        return rows


def hand_over(patches: Iterable[Patch]) -> None:
    """From now on a framework's own patch manager places these; each is put back for it first."""
    with _lock:
        new = {patch.key: patch for patch in patches if patch.key not in _handed_over}
        _withdraw(new)
        _handed_over.update(new)


def take_back() -> None:
    """End every `hand_over`: what the framework's patch manager placed is put back."""
    with _lock:
        _withdraw(_handed_over)
        _handed_over.clear()


def place(patch: Patch, original: Any) -> Any:
    """What the framework's patch manager is to place for a patch that was handed over to it.

    `original` is what its other patches make of the target: what ours falls through to. It comes
    back as it is if ours is in it already, or cannot be made.
    """
    with _lock:
        if env.settings.disable & {"all", patch.op} or patch.key not in _handed_over:
            return original
        known = [applied for applied in _live() if applied.patch.key == patch.key]
        if any(applied.replacement is inner for applied in known for inner in wrapped(original)):
            return original
        reason = _mismatch(patch, original)
        try:
            replacement = original if reason else patch.make(original)
        except Exception as error:
            reason = _cannot(error)
        if reason:
            log.once(f"{patch.target}: refused: {reason}")
            return original
        for applied in known:
            _applied.remove(applied)
        adopt(patch, original, replacement)
        return replacement


def renew(patches: Iterable[Patch]) -> list[Status]:
    """`apply`, after a framework's patch manager has put its own in place: over what it overwrote
    too, and where it gave modules what ours is around.
    """
    with _lock:
        holders = _Holders()
        top = {(id(applied.owner), applied.name): applied for applied in _live()}
        for applied in list(_live()):
            places = _importers(applied.patch, applied.original, applied.name, holders)
            if _overwritten(applied, top[id(applied.owner), applied.name]):
                if applied.here() is not applied.original:
                    _applied.remove(applied)
                    continue
                places.append((applied.owner, applied.name))
            holders.replace(places, applied.original, applied.replacement)
        return apply(patches)


def _withdraw(keys: Iterable[tuple[str, str]]) -> None:
    chosen = [applied for applied in _applied if applied.patch.key in keys]
    holders = _Holders() if chosen else None
    for applied in reversed(chosen):
        _applied.remove(applied)
        _revert(applied, holders)


def adopt(patch: Patch, original: Any, replacement: Any) -> None:
    """Someone else has put `replacement` in place: it is verified and reverted as if we had."""
    with _lock:
        if not any(applied.replacement is replacement for applied in _live()):
            owner, name = _locate(patch)
            _applied.append(_Applied(patch, owner, name, original, replacement, []))


def forget(module: str) -> None:
    """`module` ran again and has new attributes. What others hold of the old can be reverted."""
    with _lock:
        for applied in _applied:
            applied.stale |= applied.patch.module == module


def _live() -> Iterator[_Applied]:
    return (applied for applied in _applied if not applied.stale)


def _planned(patch: Patch, ready: str | None) -> Status:
    for applied in _live():
        if applied.patch.key == patch.key:
            return applied.status("applied")
    return Status(patch.target, patch.op, _state(patch, ready))


def _state(patch: Patch, ready: str | None) -> str:
    if not env.settings.disable.isdisjoint(("all", patch.op)):
        return "disabled by NPU_OPS_DISABLE"
    if not _has_run(patch.module, ready):
        return "module not imported yet"
    if patch.key in _handed_over:
        return "left to the framework's patch manager"
    reason = _why_not(patch)
    if reason:
        return f"refused: {reason}"
    return f"left to {patch.by}" if patch.by else "apply"


def _has_run(name: str, ready: str | None) -> bool:
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return module is not None and (name == ready or not getattr(spec, "_initializing", False))


def _locate(patch: Patch) -> Place:
    *owners, name = patch.attribute.split(".")
    owner = sys.modules[patch.module]
    for part in owners:
        owner = _names(owner)[part]
    return owner, name


def _names(owner: Any) -> Mapping[str, Any]:
    return owner if isinstance(owner, dict) else vars(owner)


def _why_not(patch: Patch) -> str | None:
    """None, or a sentence on why what is there cannot be replaced."""
    try:
        owner, name = _locate(patch)
        names = _names(owner)
        if patch.optional and name not in names:
            return None
        original = names[name]
    except KeyError as missing:
        return f"{patch.module} has no {missing.args[0]}; it was there in {patch.versions}"
    return _mismatch(patch, original)


def _mismatch(patch: Patch, original: Any) -> str | None:
    if not patch.signatures:
        return None
    parameters = _parameters(original)
    if parameters in patch.signatures:
        return None
    expected = " or ".join(_shown(names) for names in patch.signatures)
    return f"expected {expected} ({patch.versions}), got {_shown(parameters)} of {_whose(original)}"


def _parameters(function: Any) -> Names | None:
    if function is None:
        return None
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # not callable, or built in
        return ("?",)


def _shown(names: Names | None) -> str:
    return "None" if names is None else f"({', '.join(names)})"


def _whose(value: Any) -> str:
    module = getattr(value, "__module__", None) or type(value).__module__
    return f"{module}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def _try(patch: Patch, holders: _Holders) -> Status:
    """Apply all of a patch or nothing."""
    owner, name = _locate(patch)
    original = _names(owner).get(name, _ABSENT)
    try:
        replacement = patch.make(None if original is _ABSENT else original)
        had = holders.of(replacement, name)
        others = dict.fromkeys(_importers(patch, original, name, holders))
        places = [(owner, name), *(place for place in others if place != (owner, name))]
        holders.replace(places, original, replacement)
    except Exception as error:  # what a framework does to its own modules is not for us to foresee
        return Status(patch.target, patch.op, f"refused: {_cannot(error)}")
    applied = _Applied(patch, owner, name, original, replacement, had)
    _applied.append(applied)
    try:
        if patch.joined:
            patch.joined()
    except Exception as error:
        _applied.remove(applied)
        _revert(applied, holders)
        return Status(patch.target, patch.op, f"refused: {_cannot(error)}")
    return applied.status("applied")


def _cannot(error: Exception) -> str:
    return f"it cannot be made: {type(error).__name__}: {error}"


def _is_ours(value: Any) -> bool:
    """Whether an adapter made it: MindSpeed puts operators that it got from us where ours were."""
    return (getattr(value, "__module__", None) or "").startswith("npu_ops_adapters.")


def _verified(applied: _Applied, top: _Applied, holders: _Holders) -> str:
    if _overwritten(applied, top):
        return f"overwritten by {_whose(applied.here())}"
    importers = _importers(applied.patch, applied.original, applied.name, holders)
    captured = sorted({module.__name__ for module, _ in importers})
    return f"captured too early by {', '.join(captured)}" if captured else "applied"


def _overwritten(applied: _Applied, top: _Applied) -> bool:
    current = applied.here()
    return not _is_ours(current) and all(f is not top.replacement for f in wrapped(current))


def wrapped(function: Any) -> Iterator[Any]:
    """A function and what it wraps, outside in."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _importers(patch: Patch, original: Any, name: str, holders: _Holders) -> list[Place]:
    """Where else `original` is. One that comes from another framework may stand there, and in
    others, for something else: outside of the patch's own it is known by `name` alone.
    """
    found = holders.of(original, name) if patch.rebind else []
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


def _framework(module: str) -> str:
    return module.partition(".")[0]


def _revert(applied: _Applied, holders: _Holders) -> Status:
    """Put the original back wherever the replacement is, also where it was imported from us."""
    current = applied.here()
    places = [p for p in holders.of(applied.replacement, applied.name) if p not in applied.had]
    here = (applied.owner, applied.name)
    ours = current is applied.replacement or _is_ours(current)
    if ours and here not in places:
        places.append(here)
    holders.replace(places, applied.replacement, applied.original)
    state = "reverted" if ours or applied.stale else f"overwritten by {_whose(current)}"
    return Status(applied.patch.target, applied.patch.op, state)


class _Holders:
    """Which modules hold which functions and classes; one sweep, when first asked."""

    @functools.cached_property
    def _ids(self) -> dict[int, tuple[types.ModuleType, set[int]]]:
        """Of all that each module holds: thousands of modules, so it loops in C."""
        return {
            id(module): (module, set(map(id, list(vars(module).values()))))
            for module in list(sys.modules.values())
            if isinstance(module, types.ModuleType)
        }

    def of(self, value: Any, name: str) -> list[Place]:
        """The modules that hold `value`, and under which name.

        What a framework only borrowed (`torch.compile`) is known by `name` alone.
        """
        # Not isinstance: that asks the object, and some warn or import when asked.
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

    def replace(self, places: list[Place], old: Any, new: Any) -> None:
        """Put `new` in all places; if one refuses, `old` in all."""
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


def _put(place: Place, value: Any) -> None:
    owner, name = place
    if value is _ABSENT:
        operator.delitem(owner, name) if isinstance(owner, dict) else delattr(owner, name)
    elif isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)
