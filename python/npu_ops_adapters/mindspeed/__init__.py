"""MindSpeed core_r0.12, core_r0.16 and core_r0.18. npu-ops' patches apply over MindSpeed's.

MindSpeed patches Megatron through a manager, and `repatch` reverts and applies all patches again.
So npu-ops registers with that manager too (`features`). Other patches replace functions in
MindSpeed's own modules.
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
