"""Plans, applies, verifies and reverts patches."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from npu_ops.core import env, log
from npu_ops_adapters.patching.holders import ABSENT, Holders, Place, locate, names_of
from npu_ops_adapters.patching.records import Patch, State, Status, Statuses
from npu_ops_adapters.patching.signatures import cannot, is_ours, whose, why_not, wrapped

MANAGER = "the framework's patch manager"


@dataclasses.dataclass(eq=False)
class Applied:
    """An applied patch: its place (owner and attribute name), the original and the replacement."""

    patch: Patch
    owner: Any
    name: str
    original: Any
    replacement: Any
    had: list[Place]  # holders of the replacement before the patch was applied
    stale: bool = False  # True after its module ran again, which made new attributes

    @property
    def place(self) -> tuple[int, str]:
        return id(self.owner), self.name

    def here(self) -> Any:
        return names_of(self.owner).get(self.name)

    def status(self, state: State = State.APPLIED, detail: str = "") -> Status:
        note = self.patch.note() if self.patch.note else ""
        return Status(self.patch.target, self.patch.op, state, detail, note)


ledger: list[Applied] = []  # in the order of application
# patches that a framework's own patch manager applies
handed_over: dict[tuple[str, str], Patch] = {}
lock = threading.RLock()  # several threads may import modules


def plan(patches: Iterable[Patch], ready: str | None = None) -> Statuses:
    """Return what `apply` would do with each patch, and which patches are applied."""
    with lock:
        patches = {patch.key: patch for patch in patches}
        rows = [_planned(patch, ready) for patch in patches.values()]
        others = [applied.status() for applied in live() if applied.patch.key not in patches]
        return Statuses(rows + others)


def apply(patches: Iterable[Patch], ready: str | None = None) -> Statuses:
    """Apply the patches in order. A refused patch does not stop the others.

    ready: a module whose code has run, although Python still marks it as being imported.
    """
    with lock:
        patches, holders = list(patches), Holders()
        refused = {}
        for patch in patches:
            row = _planned(patch, ready)
            if row.state is State.READY:
                row = _try(patch, holders)
            if row.state in (State.REFUSED, State.KEPT):
                refused[patch.key] = row
                log.once(f"{patch.target}: {row.sentence}")
        return Statuses(refused.get(row.key, row) for row in plan(patches, ready))


def verify() -> Statuses:
    """Check whether each replacement is still in place."""
    with lock:
        holders, top = Holders(), outermost()
        return Statuses(_verified(applied, top[applied.place], holders) for applied in live())


def revert() -> Statuses:
    """Restore all originals, in reverse order."""
    with lock:
        holders = Holders()
        handed_over.clear()
        rows = Statuses()
        while ledger:
            applied = ledger.pop()
            rows.append(_put_back(applied, holders))
            if applied.patch.left:
                applied.patch.left()
        return rows


@contextlib.contextmanager
def protect() -> Iterator[None]:
    """Reapply the patches that a framework overwrites inside this context.

    Patches that were overwritten before stay so. Patches applied inside are protected too.
    """
    with lock:
        lost = {place for place, top in outermost().items() if is_overwritten(top, top)}
        yield
        holders = Holders()
        for place, top in outermost().items():
            if place not in lost and is_overwritten(top, top):
                holders.replace([(top.owner, top.name)], top.here(), top.replacement)


def withdraw(keys: Iterable[tuple[str, str]]) -> None:
    """Revert the patches with these keys in reverse order, without calling their `left`."""
    chosen = [applied for applied in ledger if applied.patch.key in keys]
    holders = Holders()
    for applied in reversed(chosen):
        ledger.remove(applied)
        _put_back(applied, holders)


def adopt(patch: Patch, original: Any, replacement: Any) -> None:
    """Record a replacement that someone else has set, so that `verify` and `revert` handle it."""
    with lock:
        if not any(applied.replacement is replacement for applied in live()):
            owner, name = locate(patch)
            ledger.append(Applied(patch, owner, name, original, replacement, []))


def forget(module: str) -> None:
    """Mark the patches of `module` as stale, because its code ran again.

    Other modules may still hold the old replacements, which `revert` restores.
    """
    with lock:
        for applied in ledger:
            applied.stale |= applied.patch.module == module


def live() -> Iterator[Applied]:
    """Yield the applied patches whose modules have not run again since."""
    return (applied for applied in ledger if not applied.stale)


def outermost() -> dict[tuple[int, str], Applied]:
    """Map each place, as in `Applied.place`, to the patch that was applied there last."""
    return {applied.place: applied for applied in live()}


def is_overwritten(applied: Applied, top: Applied) -> bool:
    """Return whether other code has overwritten the place of `applied`.

    False if the place holds any function of npu-ops, or a wrapper of `top`'s replacement.

    top: the last patch that was applied at that place.
    """
    current = applied.here()
    return not is_ours(current) and all(f is not top.replacement for f in wrapped(current))


def _planned(patch: Patch, ready: str | None) -> Status:
    for applied in live():
        if applied.patch.key == patch.key:
            return applied.status()
    return Status(patch.target, patch.op, *_state(patch, ready))


def _state(patch: Patch, ready: str | None) -> tuple[State, str]:
    """Return the state of a patch that is not applied, and its detail."""
    if not env.settings.disable.isdisjoint(("all", patch.op)):
        return State.DISABLED, ""
    if not _has_run(patch.module, ready):
        return State.WAITING, ""
    if patch.key in handed_over:
        return State.LEFT, MANAGER
    reason = why_not(patch)
    if reason:
        return State.KEPT if patch.may_differ else State.REFUSED, reason
    return (State.LEFT, patch.by) if patch.by else (State.READY, "")


def _has_run(name: str, ready: str | None) -> bool:
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return module is not None and (name == ready or not getattr(spec, "_initializing", False))


def _try(patch: Patch, holders: Holders) -> Status:
    """Apply a patch completely or not at all."""
    owner, name = locate(patch)
    original = names_of(owner).get(name, ABSENT)
    try:
        replacement = patch.make(None if original is ABSENT else original)
        had = holders.of(replacement, name)
        others = dict.fromkeys(holders.importers(patch, original, name))
        places = [(owner, name), *(place for place in others if place != (owner, name))]
        holders.replace(places, original, replacement)
    except Exception as error:  # a framework may fail in any way here
        return Status(patch.target, patch.op, State.REFUSED, cannot(error))
    applied = Applied(patch, owner, name, original, replacement, had)
    ledger.append(applied)
    try:
        if patch.joined:
            patch.joined()
    except Exception as error:
        ledger.remove(applied)
        _put_back(applied, holders)
        return Status(patch.target, patch.op, State.REFUSED, cannot(error))
    return applied.status()


def _verified(applied: Applied, top: Applied, holders: Holders) -> Status:
    if is_overwritten(applied, top):
        return applied.status(State.OVERWRITTEN, whose(applied.here()))
    importers = holders.importers(applied.patch, applied.original, applied.name)
    captured = sorted({module.__name__ for module, _ in importers})
    return applied.status(State.CAPTURED, ", ".join(captured)) if captured else applied.status()


def _put_back(applied: Applied, holders: Holders) -> Status:
    """Restore the original at every place that holds the replacement, also in importing modules."""
    current = applied.here()
    places = [p for p in holders.of(applied.replacement, applied.name) if p not in applied.had]
    here = (applied.owner, applied.name)
    ours = current is applied.replacement or is_ours(current)
    if ours and here not in places:
        places.append(here)
    holders.replace(places, applied.replacement, applied.original)
    patch = applied.patch
    if ours or applied.stale:
        return Status(patch.target, patch.op, State.REVERTED)
    return Status(patch.target, patch.op, State.OVERWRITTEN, whose(current))
