"""Lets a framework's own patch manager (MindSpeed's) apply npu-ops' patches.

Such a manager overwrites functions that other code has replaced. So `hand_over` reverts our patches
and leaves their targets to the manager. Each time the manager patches a target, it calls `place` to
get our replacement. `renew` is called after the manager has finished. `take_back` undoes
`hand_over`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from npu_ops.core import env, log
from npu_ops_adapters.patching import engine
from npu_ops_adapters.patching.holders import Holders
from npu_ops_adapters.patching.records import Patch, Statuses
from npu_ops_adapters.patching.signatures import cannot, mismatch, wrapped


def hand_over(patches: Iterable[Patch]) -> None:
    """Leave these patches to the framework's patch manager; revert those that are applied."""
    with engine.lock:
        new = {patch.key: patch for patch in patches if patch.key not in engine.handed_over}
        engine.withdraw(new)
        engine.handed_over.update(new)


def take_back() -> None:
    """End every `hand_over`: revert what the framework's patch manager placed."""
    with engine.lock:
        engine.withdraw(engine.handed_over)
        engine.handed_over.clear()


def place(patch: Patch, original: Any) -> Any:
    """Return the function that the framework's patch manager sets for a patch handed over to it.

    Args:
        original: the target as the manager's other patches leave it. Our replacement calls it for
            calls that npu-ops does not support.

    Returns:
        Our replacement; or `original` itself, if that contains ours already or ours cannot be made.
    """
    with engine.lock:
        if env.settings.disable & {"all", patch.op} or patch.key not in engine.handed_over:
            return original
        known = [applied for applied in engine.live() if applied.patch.key == patch.key]
        if any(applied.replacement is inner for applied in known for inner in wrapped(original)):
            return original
        reason = mismatch(patch, original)
        try:
            replacement = original if reason else patch.make(original)
        except Exception as error:
            reason = cannot(error)
        if reason:
            log.once(f"{patch.target}: refused: {reason}")
            return original
        for applied in known:
            engine.ledger.remove(applied)
        engine.adopt(patch, original, replacement)
        return replacement


def renew(patches: Iterable[Patch]) -> Statuses:
    """Apply patches after a framework's patch manager has applied its own.

    Reapplies npu-ops' patches that the manager has overwritten, also in modules to which the
    manager gave the original.
    """
    with engine.lock:
        holders = Holders()
        top = engine.outermost()
        for applied in list(engine.live()):
            places = holders.importers(applied.patch, applied.original, applied.name)
            if engine.is_overwritten(applied, top[applied.place]):
                if applied.here() is not applied.original:
                    engine.ledger.remove(applied)
                    continue
                places.append((applied.owner, applied.name))
            holders.replace(places, applied.original, applied.replacement)
        return engine.apply(patches)
