"""Relax's process groups under newer torch, whose collectives have new names."""

from __future__ import annotations

from collections.abc import Iterable

from npu_ops_adapters import reloadable_groups
from npu_ops_adapters.patching import Patch


def patches() -> Iterable[Patch]:
    """Methods of torch's groups that Relax's class does not pass on."""
    return reloadable_groups.patches(
        "relax.utils.reloadable_process_group", "relax_process_groups", "Relax 36a3e048"
    )
