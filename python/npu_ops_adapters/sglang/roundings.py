"""With NPU_OPS_CONSISTENT, rounds SGLang's element-wise products and sums as in training.

SGLang fuses `x * sigmoid(gate)` and `silu(gate) * up`, which then round once. transformers also
rounds the activation. SGLang adds the deepstack features of Qwen3-VL's vision tower before a
layer's residual, transformers after it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

from npu_ops.core import env
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.sglang import functions

_WHY = "it rounds once where training rounds twice"
_GATED = (
    ("x", "gate"),  # sgl-kernel-npu
    ("x", "gate", "inplace"),
    ("attn_output", "gate", "inplace"),
    ("attn_output", "gate", "inplace", "quant"),
)


def patches() -> Iterable[Patch]:
    """Yield the patches, or nothing without NPU_OPS_CONSISTENT."""
    if not env.settings.consistent:
        return
    names = ["fused_sigmoid_mul", *(["npu_fused_sigmoid_mul"] if functions.on_npu() else [])]
    for name in names:
        target = f"sglang.srt.models.qwen3_5:{name}"
        yield functions.replaced(target, "attention", gated, _WHY, *_GATED, optional=True)
    if functions.on_npu() and functions.since("0.5.23"):
        target = "sglang.srt.models.qwen4_exp:fused_sigmoid_mul"
        yield functions.replaced(target, "attention", gated, _WHY, *_GATED)
    for way in ("cpu", "npu"):
        target = f"sglang.srt.layers.activation:SiluAndMul.forward_{way}"
        yield functions.replaced(target, "linear", silu_and_mul, _WHY, ("self", "x"))
    yield Patch(
        target="sglang.srt.models.qwen3_vl:Qwen3LLMModel.__init__", op="linear",
        make=with_the_order_of_training, why="it adds deepstack in another order than training",
        signatures=(("self", "config", "quant_config", "prefix"),), versions=functions.VERSIONS,
        remove_when="SGLang has an option for that order only", optional=True,
    )  # fmt: skip


def gated(attn_output, gate, inplace=True, quant=False):
    """Return `attn_output * sigmoid(gate)` as a new tensor, even with inplace=True."""
    functions.refuse(quant=quant)
    return attn_output * torch.sigmoid(gate.reshape(attn_output.shape))


def silu_and_mul(module, x):
    """Return `silu(gate) * up`; x has gate, then up, in its last dimension."""
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def with_the_order_of_training(original: Callable) -> Callable:
    """Wrap `__init__` to set SGLang's option for trainers: the deepstack order of transformers."""

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.use_hf_deepstack_order = True

    return __init__
