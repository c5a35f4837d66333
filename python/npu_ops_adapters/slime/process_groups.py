"""Adds collectives under the names of newer torch to slime's process groups."""

from __future__ import annotations

from collections.abc import Iterable

from npu_ops_adapters import reloadable_groups
from npu_ops_adapters.patching import Patch


def patches() -> Iterable[Patch]:
    """Add methods of torch's ProcessGroup that slime's class does not forward."""
    return reloadable_groups.patches(
        "slime.utils.reloadable_process_group", "slime_process_groups", "slime v0.2.2 and 624b824a"
    )
