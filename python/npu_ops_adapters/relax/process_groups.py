"""Adds collectives under the names of newer torch to Relax's process groups."""

from __future__ import annotations

from collections.abc import Iterable

from npu_ops_adapters import reloadable_groups
from npu_ops_adapters.patching import Patch


def patches() -> Iterable[Patch]:
    """Add methods of torch's ProcessGroup that Relax's class does not forward."""
    return reloadable_groups.patches(
        "relax.utils.reloadable_process_group", "relax_process_groups", "Relax 36a3e048"
    )
