"""MindSpeed core_r0.12, core_r0.16 and core_r0.18. npu-ops' patches apply on top of MindSpeed's.

MindSpeed patches Megatron through a manager, whose `repatch` reverts and reapplies all patches. So
npu-ops also registers with that manager (`features`). Other patches replace functions in
MindSpeed's own modules.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable

from npu_ops_adapters.patching import Patch

VERSIONS = "MindSpeed core_r0.12 to core_r0.18"


def patches() -> Iterable[Patch]:
    """Yield the patches of MindSpeed's own modules.

    MindSpeed's manager applies the patches of Megatron that `features.covered` lists.
    """
    for module in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        yield from importlib.import_module(f"{__name__}.{module}").patches()
