"""With NPU_OPS_CONSISTENT, features of Qwen3-VL's vision tower are added as in training.

In training, deepstack adds the features to a layer's output. In vLLM a layer returns two tensors,
which the next norm adds, and deepstack adds the features to the first one before that sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from npu_ops.core import env
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.vllm import functions
from npu_ops_adapters.vllm.vision_position import MODEL


def patches() -> Iterable[Patch]:
    """Patch `__init__` of the models."""
    if env.settings.consistent:
        for target in (f"{MODEL}:Qwen3VL", f"{MODEL}_moe:Qwen3VLMoe"):
            yield Patch(
                target=f"{target}ForConditionalGeneration.__init__", op="linear", make=with_sums,
                why="it adds deepstack in another order than training",
                signatures=(("self", "vllm_config", "prefix"),), versions=functions.VERSIONS,
                remove_when="vLLM adds deepstack to the sum",
            )  # fmt: skip


def with_sums(original: Callable) -> Callable:
    """Wrap `__init__` so that each layer to which deepstack adds returns the sum of its tensors."""

    @functools.wraps(original)
    def __init__(self, *args, **settings):
        original(self, *args, **settings)
        text, levels = self.language_model.model, self.deepstack_num_level
        if 0 < text.end_layer <= levels:
            raise RuntimeError(
                f"NPU_OPS_CONSISTENT: got {text.end_layer} layers on the first rank of a pipeline, "
                f"needs more than the {levels} to which deepstack adds"
            )
        for layer in text.layers[text.start_layer : levels]:
            layer.forward = functools.partial(_sum, layer.forward)

    return __init__


def _sum(forward: Callable, *args, **settings):
    """Return the sum of a layer's two tensors, and None in place of the second one."""
    out, residual = forward(*args, **settings)
    return out + residual, None
