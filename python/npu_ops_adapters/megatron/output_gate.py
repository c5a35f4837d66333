"""With NPU_OPS_CONSISTENT, rounds the gate of attention's output as transformers does.

Megatron multiplies by the sigmoid in fp32 and rounds once. transformers, and so npu-ops in a
server, also rounds the sigmoid.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable

import torch

from npu_ops.core import env
from npu_ops_adapters.patching import Patch

_HOME = "megatron.core.transformer.attention"


def patches() -> Iterable[Patch]:
    """Patch the method that multiplies by the gate, with NPU_OPS_CONSISTENT only."""
    owner = getattr(sys.modules.get(_HOME), "Attention", None)
    if env.settings.consistent and hasattr(owner, "_apply_output_gate"):  # from 0.16 on
        yield Patch(
            target=f"{_HOME}:Attention._apply_output_gate",
            op="attention",
            make=_replace,
            why="it rounds once where an inference server rounds twice",
            signatures=(("self", "x", "gate"),),
            versions="Megatron-Core 0.16 to 0.19",
            remove_when="Megatron-Core rounds the sigmoid as transformers does",
        )


def _replace(original: Callable) -> Callable:
    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_output_gate(self, x, gate):
        return x * torch.sigmoid(gate.reshape(x.shape))

    return npu_ops_output_gate
