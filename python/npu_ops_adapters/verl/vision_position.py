"""With NPU_OPS_CONSISTENT, verl's vision position embedding equals the servers' bit for bit.

verl sets its own function in transformers' models. Only some versions of transformers call it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from npu_ops.core import env
from npu_ops_adapters.calls import falling_through
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.transformers.vision_position import method

_MODULES = ("qwen3_vl", "qwen3_5")


def patches() -> Iterable[Patch]:
    """Patch the function, before verl sets it in a model."""
    for module in _MODULES if env.settings.consistent else ():
        yield Patch(
            target=f"verl.models.transformers.{module}:fast_pos_embed_interpolate",
            op="vision_position", make=functools.partial(falling_through, method),
            why="it rounds the weights, and inference servers with npu-ops do not",
            signatures=(("self", "grid_thw"),), versions="verl 0.9.1",
            remove_when="verl supports no transformers before 5.9",
        )  # fmt: skip
