"""Relax on NPUs: adds what it lacks, so that its `relax.entrypoints.train` runs unchanged.

    arguments        options that Relax and MindSpeed both define
    gated_delta_net  settings that MindSpeed-Bridge's layer reads
    process_groups   collectives that newer torch has renamed

Relax itself requests NPUs from Ray and imports MindSpeed before Megatron-LM. It is patched only in
processes that have an NPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from npu_ops.core import hardware
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.relax import arguments, gated_delta_net, process_groups

# A process of Relax imports one of these before MindSpeed. "relax" alone could be another package.
_HERE = frozenset({"relax.backends.megatron", "relax.utils"})


def patches() -> Iterable[Patch]:
    """Yield all patches until Relax or MindSpeed is imported.

    Afterwards yield them only in a process of Relax that has an NPU.
    """
    if not _HERE.isdisjoint(sys.modules):
        if hardware.is_npu():
            yield from _all()
    elif "mindspeed" not in sys.modules:
        yield from _all()


def _all() -> Iterable[Patch]:
    for module in (arguments, gated_delta_net, process_groups):
        yield from module.patches()
