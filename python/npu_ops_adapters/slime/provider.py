"""Copies slime's arguments to Megatron-Bridge's provider; slime v0.2.2 passes only a few.

MindSpeed's functions read their settings from the provider, because it is the configuration of the
model.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable

from npu_ops_adapters.patching import Patch

_ARGUMENTS = "mindspeed.args_utils"  # holds slime's arguments after `mindspeed` has passed them on
# The provider has these attributes already, with defaults that may differ from slime's arguments.
ASKED = (
    "gradient_accumulation_fusion",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
)


def patches() -> Iterable[Patch]:
    """Patch `finalize`, which slime calls after it has set its own few arguments.

    Only slime's processes are patched.
    """
    if "megatron" in sys.modules and "slime" not in sys.modules:
        return
    yield Patch(
        target="megatron.bridge.models.transformer_config:TransformerConfig.finalize",
        op="slime_provider",
        make=_with_arguments,
        why="slime passes a few arguments to the provider, and MindSpeed reads others from it",
        signatures=(("self",),),
        versions="slime v0.2.2, Megatron-Bridge 0.3.1",
        remove_when="slime passes all of its arguments to the provider",
    )


def _with_arguments(original: Callable) -> Callable:
    @functools.wraps(original)
    def npu_ops_finalize(self):
        full = getattr(sys.modules.get(_ARGUMENTS), "get_full_args", None)
        if full and "slime" in sys.modules:
            for name, value in vars(full()).items():
                if name in ASKED or not hasattr(self, name):
                    setattr(self, name, value)
        return original(self)

    return npu_ops_finalize
