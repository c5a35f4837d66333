"""The gates of Gated Delta Net: a method of its own from 0.18 on, several kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

import npu_ops
from npu_ops.core import check
from npu_ops_adapters.megatron import gated_delta_net
from npu_ops_adapters.patching import Patch

PARAMETERS = ("A_log_local_cp", "dt_bias_local_cp", "alpha", "beta")


def patches() -> Iterable[Patch]:
    """The method; before 0.18 `forward` has it inline."""
    yield from gated_delta_net.method(
        "_compute_g_and_beta",
        "gdn_gate",
        replace,
        PARAMETERS,
        why="it is six kernels, and exp(A_log) is rounded to the parameter's dtype",
    )


def replace(original: Callable) -> Callable:
    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_gate(self, A_log_local_cp, dt_bias_local_cp, alpha, beta):
        if _is_ours(A_log_local_cp, dt_bias_local_cp, alpha, beta):
            return npu_ops.gdn_gate(alpha, A_log_local_cp, dt_bias_local_cp, beta)
        return original(self, A_log_local_cp, dt_bias_local_cp, alpha, beta)

    return npu_ops_gate


def _is_ours(A_log, dt_bias, alpha, beta) -> bool:
    tensors = (A_log, dt_bias, alpha, beta)
    return (
        all(isinstance(x, torch.Tensor) and x.dtype in check.FLOATS for x in tensors)
        and torch.float64 not in (x.dtype for x in tensors)  # which Megatron computes in fp32
        and all(x.device == alpha.device for x in tensors)
        and alpha.dim() > 0
        and alpha.shape == beta.shape
        and A_log.shape == dt_bias.shape == alpha.shape[-1:]
    )
