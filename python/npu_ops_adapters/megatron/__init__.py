"""Adapters for Megatron-Core 0.12 to 0.19 and main: one file per op, each with `patches()`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable

from npu_ops_adapters.megatron.attention import npuify
from npu_ops_adapters.patching import Patch

__all__ = ["npuify", "patches"]


def patches() -> Iterable[Patch]:
    """Yield all patches: jit_fuser first, gated_delta_net last.

    jit_fuser's patches unwrap functions that other patches wrap. gated_delta_net checks whether the
    other patches are applied.
    """
    order = {"jit_fuser": 0, "gated_delta_net": 2}
    names = sorted(
        (module.name for module in pkgutil.iter_modules(__path__)),
        key=lambda name: (order.get(name, 1), name),
    )
    for name in names:
        yield from importlib.import_module(f"{__name__}.{name}").patches()
