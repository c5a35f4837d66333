"""Relax on NPUs: what it lacks there, so that its own `relax.entrypoints.train` trains unchanged.

    arguments        options that Relax and MindSpeed both define
    gated_delta_net  settings that MindSpeed-Bridge's layer asks for
    process_groups   collectives that newer torch calls by new names

Relax itself asks Ray for NPUs and imports MindSpeed before Megatron-LM. It is changed only in
processes that have an NPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from npu_ops.core import hardware
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.relax import arguments, gated_delta_net, process_groups

# Of which a process of Relax has imported one before MindSpeed; other projects are named relax too.
_HERE = frozenset({"relax.backends.megatron", "relax.utils"})


def patches() -> Iterable[Patch]:
    """All of them until one of their packages is imported; then those that this process is for."""
    if not _HERE.isdisjoint(sys.modules):
        if hardware.is_npu():
            yield from _all()
    elif "mindspeed" not in sys.modules:
        yield from _all()


def _all() -> Iterable[Patch]:
    for module in (arguments, gated_delta_net, process_groups):
        yield from module.patches()
