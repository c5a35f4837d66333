"""RMSNorm whose weight is what is added to 1, as in Qwen3-Next and Qwen3.5.

MindSpeed computes 1 + weight in the weight's dtype. In bf16 that rounds the sum, so a trainer
normalises by other weights than transformers, Transformer Engine and a server do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

import npu_ops
from npu_ops.core import check
from npu_ops_adapters.megatron.rms_norm_gated import is_zero_centered
from npu_ops_adapters.mindspeed import VERSIONS
from npu_ops_adapters.patching import Patch


def patches() -> Iterable[Patch]:
    """The method; a norm of plain weights stays with torch_npu's operator."""
    yield Patch(
        target="mindspeed.core.fusions.fused_rms_norm:RMSNorm.forward",
        op="rms_norm",
        make=replace,
        why="1 + weight is rounded, which it is not in Transformer Engine nor in a server",
        signatures=(("self", "x"),),
        versions=VERSIONS,
        remove_when="MindSpeed adds 1 in fp32",
    )


def replace(original: Callable) -> Callable:
    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_norm(self, x):
        if _is_ours(self, x):
            return npu_ops.rms_norm(x, self.weight, self.eps, zero_centered=True)
        return original(self, x)

    return npu_ops_norm


def _is_ours(norm, x) -> bool:
    return (
        is_zero_centered(norm)
        and isinstance(x, torch.Tensor)
        and x.dtype in check.FLOATS
        and norm.weight.dtype in check.FLOATS
        and norm.weight.device == x.device
        and norm.weight.shape == x.shape[-1:]
    )
