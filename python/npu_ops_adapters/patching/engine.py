"""Planning, applying, verifying and reverting patches."""

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
    """A patch in force: what was where, and what is there now."""

    patch: Patch
    owner: Any
    name: str
    original: Any
    replacement: Any
    had: list[Place]  # who held the replacement before
    stale: bool = False  # its module ran again, so it has new attributes

    @property
    def place(self) -> tuple[int, str]:
        return id(self.owner), self.name

    def here(self) -> Any:
        return names_of(self.owner).get(self.name)

    def status(self, state: State = State.APPLIED, detail: str = "") -> Status:
        note = self.patch.note() if self.patch.note else ""
        return Status(self.patch.target, self.patch.op, state, detail, note)


ledger: list[Applied] = []  # in the order of application
handed_over: dict[tuple[str, str], Patch] = {}  # to a framework's own patch manager
lock = threading.RLock()  # modules may be imported by several threads


def plan(patches: Iterable[Patch], ready: str | None = None) -> Statuses:
    """What `apply` would do with each, and what is applied."""
    with lock:
        patches = {patch.key: patch for patch in patches}
        rows = [_planned(patch, ready) for patch in patches.values()]
        others = [applied.status() for applied in live() if applied.patch.key not in patches]
        return Statuses(rows + others)


def apply(patches: Iterable[Patch], ready: str | None = None) -> Statuses:
    """Apply those that are not, in order; a refused one does not keep the others from it.

    ready: a module that has run, though Python still marks it as being imported.
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
    """Whether what was replaced still is."""
    with lock:
        holders, top = Holders(), outermost()
        return Statuses(_verified(applied, top[applied.place], holders) for applied in live())


def revert() -> Statuses:
    """Put everything back, the last first."""
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
    """Put back the patches that a framework overwrites inside this context.

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
    """Put back the patches of these keys, the last first, without a word to them."""
    chosen = [applied for applied in ledger if applied.patch.key in keys]
    holders = Holders()
    for applied in reversed(chosen):
        ledger.remove(applied)
        _put_back(applied, holders)


def adopt(patch: Patch, original: Any, replacement: Any) -> None:
    """Someone else has put `replacement` in place: it is verified and reverted as if we had."""
    with lock:
        if not any(applied.replacement is replacement for applied in live()):
            owner, name = locate(patch)
            ledger.append(Applied(patch, owner, name, original, replacement, []))


def forget(module: str) -> None:
    """`module` ran again and has new attributes. What others hold of the old can be reverted."""
    with lock:
        for applied in ledger:
            applied.stale |= applied.patch.module == module


def live() -> Iterator[Applied]:
    """What is applied to modules as they are now."""
    return (applied for applied in ledger if not applied.stale)


def outermost() -> dict[tuple[int, str], Applied]:
    """Of each place, the patch that was applied to it last."""
    return {applied.place: applied for applied in live()}


def is_overwritten(applied: Applied, top: Applied) -> bool:
    """Whether something else is in the place of `applied`, on which `top` is the last of ours."""
    current = applied.here()
    return not is_ours(current) and all(f is not top.replacement for f in wrapped(current))


def _planned(patch: Patch, ready: str | None) -> Status:
    for applied in live():
        if applied.patch.key == patch.key:
            return applied.status()
    return Status(patch.target, patch.op, *_state(patch, ready))


def _state(patch: Patch, ready: str | None) -> tuple[State, str]:
    """The state of a patch that is not applied, and its detail."""
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
    """Apply all of a patch or nothing."""
    owner, name = locate(patch)
    original = names_of(owner).get(name, ABSENT)
    try:
        replacement = patch.make(None if original is ABSENT else original)
        had = holders.of(replacement, name)
        others = dict.fromkeys(holders.importers(patch, original, name))
        places = [(owner, name), *(place for place in others if place != (owner, name))]
        holders.replace(places, original, replacement)
    except Exception as error:  # what a framework does to its own modules is not for us to foresee
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
    """Put the original back wherever the replacement is, also where it was imported from us."""
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
