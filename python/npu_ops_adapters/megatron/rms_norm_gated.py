"""Replaces Gated Delta Net's gated norm: RMSNorm of the delta rule's output, times a gate."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable

import torch

import npu_ops
from npu_ops.core import check
from npu_ops_adapters.megatron import gated_delta_net
from npu_ops_adapters.patching import Patch

PARAMETERS = ("x", "gate")


def patches() -> Iterable[Patch]:
    """Patch `_apply_gated_norm`, which normalizes, multiplies by the gate and rounds."""
    yield from gated_delta_net.method(
        "_apply_gated_norm",
        "rms_norm_gated",
        replace,
        PARAMETERS,
        why="it launches five kernels, and keeps the result of each for backward",
    )


def replace(original: Callable) -> Callable:
    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_gated_norm(self, x, gate):
        if not _is_ours(self.out_norm, self.act_fn, x, gate):
            return original(self, x, gate)
        width = x.shape[-1]
        x, gate = x.reshape(-1, width), gate.reshape(-1, width)
        return npu_ops.rms_norm_gated(x, _weight(self.out_norm), gate, self.out_norm.eps)

    return npu_ops_gated_norm


def _is_ours(norm, activation, x, gate) -> bool:
    return (
        _is_plain(norm)
        and activation is torch.nn.functional.silu
        and all(isinstance(tensor, torch.Tensor) for tensor in (x, gate))
        and all(tensor.dtype in check.FLOATS for tensor in (x, gate, norm.weight))
        and torch.float64 not in (x.dtype, gate.dtype)  # Megatron computes the gate in fp32
        and norm.weight.device == gate.device == x.device
        and norm.weight.shape == x.shape[-1:]
        and x.shape == gate.shape
    )


def _is_plain(norm) -> bool:
    """Return whether `norm` is torch's RMSNorm or MindSpeed's.

    Other norms may use `weight` differently, or have hooks.
    """
    if type(norm) is torch.nn.RMSNorm:
        return norm.weight is not None and norm.eps is not None
    mindspeed = sys.modules.get("mindspeed.core.fusions.fused_rms_norm")
    return type(norm) is getattr(mindspeed, "RMSNorm", None)


def _weight(norm) -> torch.Tensor:
    return 1 + norm.weight.float() if is_zero_centered(norm) else norm.weight


def is_zero_centered(norm) -> bool:
    """Return whether the norm multiplies by 1 + weight, an option of MindSpeed's norm (Qwen3.5)."""
    config = getattr(norm, "config", None)
    return getattr(config, "layernorm_zero_centered_gamma", False)
