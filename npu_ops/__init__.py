"""npu-ops: operators for Qwen3-VL, Qwen3-Next and Qwen3.5 class models on Ascend NPUs.

Importing npu_ops needs only torch. triton and torch_npu are loaded when an implementation that
needs them is first chosen. Every folder of `npu_ops.ops` declares an op. This module exports the
public functions of all ops.
"""

import importlib
import pkgutil

from npu_ops import ops
from npu_ops.core import compile_cache, env
from npu_ops.core.hardware import is_npu
from npu_ops.core.library import build_info, say_what_is_broken
from npu_ops.core.registry import check_forced, explain
from npu_ops.version import __version__

__all__ = ["__version__", "build_info", "explain", "is_npu"]

for _module in pkgutil.iter_modules(ops.__path__, f"{ops.__name__}."):
    _op = importlib.import_module(_module.name)
    globals().update({_name: getattr(_op, _name) for _name in _op.__all__})
    __all__.extend(_op.__all__)


def __dir__() -> list[str]:
    """List the public names only, without this file's own imports, e.g. for completion."""
    return list(__all__)


say_what_is_broken()
check_forced()
compile_cache.tell_torch()
if env.settings.consistent:
    from npu_ops import consistent

    consistent.install()
