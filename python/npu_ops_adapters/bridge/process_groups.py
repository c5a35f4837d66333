"""Sets Megatron-LM's process groups in Bridge's Qwen3-VL provider, if the trainer set none.

Bridge sets the groups when it builds the model itself. slime and others call the provider's
`provide`, which does not set them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable

from npu_ops_adapters.patching import Patch

_MODULE = "megatron.bridge.models.qwen_vl.qwen3_vl_provider"


def patches() -> Iterable[Patch]:
    """Patch `provide` of the dense model and of the mixture-of-experts model."""
    for name in ("Qwen3VLModelProvider", "Qwen3VLMoEModelProvider"):
        yield Patch(
            target=f"{_MODULE}:{name}.provide",
            op="bridge_process_groups",
            make=_with_groups,
            why=(
                "a trainer that calls this function sets no process groups, but the model "
                "needs them"
            ),
            signatures=(("self", "pre_process", "post_process", "vp_stage"),),
            versions="Megatron-Bridge 0.3.1",
            remove_when="Megatron-Bridge's provider asks Megatron-LM for groups that are not set",
        )


def _with_groups(original: Callable) -> Callable:
    @functools.wraps(original)
    def npu_ops_provide(self, pre_process=None, post_process=None, vp_stage=None):
        if getattr(self, "_pg_collection", self) is None:
            config = importlib.import_module("megatron.core.process_groups_config")
            self._pg_collection = config.ProcessGroupCollection.use_mpu_process_groups()
        return original(self, pre_process, post_process, vp_stage)

    return npu_ops_provide
