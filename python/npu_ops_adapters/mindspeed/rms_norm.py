"""Replaces RMSNorm where it multiplies by 1 + weight, as in Qwen3-Next and Qwen3.5.

MindSpeed computes 1 + weight in the weight's dtype. In bf16 that rounds the sum, so a trainer
normalizes with other weights than transformers, Transformer Engine and a server. MindSpeed's norm
inside a projection layer computes everything in that dtype, even the squares and their mean.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable

import torch

import npu_ops
from npu_ops.core import check
from npu_ops_adapters.megatron.rms_norm_gated import is_zero_centered
from npu_ops_adapters.mindspeed import VERSIONS
from npu_ops_adapters.patching import Patch

_PROJECTION = "mindspeed.te.pytorch.module.layernorm_column_parallel_linear"
_CLASS = "TELayerNormColumnParallelLinear"  # only core_r0.16's has zero-centered weights


def patches() -> Iterable[Patch]:
    """Patch the methods. A norm that multiplies by weight still uses torch_npu's operator."""
    yield Patch(
        target="mindspeed.core.fusions.fused_rms_norm:RMSNorm.forward",
        op="rms_norm",
        make=replace,
        why="it rounds 1 + weight; Transformer Engine and inference servers do not",
        signatures=(("self", "x"),),
        versions=VERSIONS,
        remove_when="MindSpeed adds 1 in fp32",
    )
    home = sys.modules.get(_PROJECTION)
    if home is None or hasattr(home, _CLASS):
        yield Patch(
            target=f"{_PROJECTION}:{_CLASS}._rmsnorm",
            op="rms_norm",
            make=_before_product,
            why="it computes in bf16; Transformer Engine and inference servers do not",
            signatures=(("self", "inp"),),
            versions="MindSpeed core_r0.16",
            remove_when="MindSpeed computes this norm in fp32",
        )


def replace(original: Callable) -> Callable:
    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_norm(self, x):
        if _is_ours(self, x, self.weight):
            return npu_ops.rms_norm(x, self.weight, self.eps, zero_centered=True)
        return original(self, x)

    return npu_ops_norm


def _before_product(original: Callable) -> Callable:
    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_norm(self, inp):
        weight = self.layer_norm_weight
        if _is_ours(self, inp, weight):
            eps = self.config.layernorm_epsilon
            return npu_ops.rms_norm(inp, weight, eps, zero_centered=True)
        return original(self, inp)

    return npu_ops_norm


def _is_ours(norm, x, weight: torch.Tensor) -> bool:
    return (
        is_zero_centered(norm)
        and isinstance(x, torch.Tensor)
        and x.dtype in check.FLOATS
        and weight.dtype in check.FLOATS
        and weight.device == x.device
        and weight.shape == x.shape[-1:]
    )
