"""MindSpeed core_r0.12, core_r0.16 and core_r0.18: a layer above its own features.

MindSpeed patches Megatron through a manager that takes all out and puts it in anew, so ours goes
through that manager too (`features`). The rest are patches of MindSpeed's own modules.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable

from npu_ops_adapters.patching import Patch

VERSIONS = "MindSpeed core_r0.12 to core_r0.18"


def patches() -> Iterable[Patch]:
    """What is replaced in MindSpeed itself; `features.covered` is what it places for us."""
    for module in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        yield from importlib.import_module(f"{__name__}.{module}").patches()
