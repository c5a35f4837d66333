"""With NPU_OPS_CONSISTENT, SGLang's element-wise products are rounded as often as in training.

SGLang fuses `x * sigmoid(gate)` and `silu(gate) * up`, which then round once. Models of
transformers round the activation, too.
"""

from __future__ import annotations

from collections.abc import Iterable

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
    """Both, where the same numbers as in training are asked for."""
    if not env.settings.consistent:
        return
    names = ["fused_sigmoid_mul", *(["npu_fused_sigmoid_mul"] if functions.on_npu() else [])]
    for name in names:
        target = f"sglang.srt.models.qwen3_5:{name}"
        yield functions.replaced(target, "attention", gated, _WHY, *_GATED, optional=True)
    for way in ("cpu", "npu"):
        target = f"sglang.srt.layers.activation:SiluAndMul.forward_{way}"
        yield functions.replaced(target, "linear", silu_and_mul, _WHY, ("self", "x"))


def gated(attn_output, gate, inplace=True, quant=False):
    """The result is always a new tensor."""
    functions.refuse(quant=quant)
    return attn_output * torch.sigmoid(gate.reshape(attn_output.shape))


def silu_and_mul(module, x):
    """x is the gate and, behind it, what it opens."""
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up
