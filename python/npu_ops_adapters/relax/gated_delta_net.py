"""Adds settings that MindSpeed-Bridge's layer of Gated Delta Net reads and Relax does not set."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable

from npu_ops_adapters.patching import Patch

_LAYER = "mindspeed_bridge.models.qwen_vl.modelling_qwen3_vl.gated_delta_net"
# The layer has three implementations of the delta rule. With both settings False it selects the
# PyTorch one, which npu-ops replaces.
_ASKED = ("use_triton_gdn", "use_ascend_gdn")


def patches() -> Iterable[Patch]:
    """Patch the layer's constructor."""
    yield Patch(
        target=f"{_LAYER}:GatedDeltaNet.__init__",
        op="relax_gated_delta_net",
        make=_with_settings,
        why="the layer reads settings from the configuration that Relax does not set",
        signatures=(),
        versions="Relax 36a3e048, MindSpeed-Bridge of May 2026",
        remove_when="Relax sets them, or MindSpeed-Bridge's configuration has them",
        rebind=False,
        why_not=_why_not,
    )


def _why_not(init: Callable) -> str | None:
    found = tuple(inspect.signature(init).parameters)[:2]
    return None if found == ("self", "config") else f"its first parameters: got {found}"


def _with_settings(original: Callable) -> Callable:
    @functools.wraps(original)
    def npu_ops_init(self, config, *args, **kwargs):
        for name in _ASKED:
            if not hasattr(config, name):
                setattr(config, name, False)
        original(self, config, *args, **kwargs)

    return npu_ops_init
