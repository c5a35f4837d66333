"""Replaces the method for Gated Delta Net's gates: new in Megatron-Core 0.18, renamed in main."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable

import torch

import npu_ops
from npu_ops.core import check
from npu_ops_adapters.megatron import gated_delta_net, gdn_decay
from npu_ops_adapters.patching import Patch

PARAMETERS = ("A_log_local_cp", "dt_bias_local_cp", "alpha", "beta")
_OF_ANY_VARIANT = (*PARAMETERS[:2], "batch", "seq_len", "gate_feats")
_WHY = "it launches six kernels, and rounds exp(A_log) to the parameter's dtype"


def patches() -> Iterable[Patch]:
    """Patch the method; before 0.18 `forward` computes the gates inline, see gdn_decay.py.

    If neither is found, the method must have another name. Then yield a patch of a missing name:
    it is refused, and the refusal is reported.
    """
    found = [
        *gated_delta_net.method("_compute_g_and_beta", "gdn_gate", replace, PARAMETERS, _WHY),
        *(
            patch
            for patch in gated_delta_net.method(
                "_compute_gates", "gdn_gate", replace_gates, _OF_ANY_VARIANT, _WHY
            )
            if patch.attribute.startswith("GatedDeltaNet.")  # other variants have other gates
        ),
    ]
    layers = [layer for *_, layer in gated_delta_net.layers() if "forward" in vars(layer)]
    whole = all(module in sys.modules for module in gated_delta_net.importers())
    inline = any(gdn_decay.computes_it(layer.forward) for layer in layers)
    if layers and whole and not found and not inline:
        yield from gated_delta_net.replaced(
            "GatedDeltaNet._compute_g_and_beta", "gdn_gate", replace, (), why=_WHY
        )
    yield from found


def replace(original: Callable) -> Callable:
    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_gate(self, A_log_local_cp, dt_bias_local_cp, alpha, beta):
        if _is_ours(A_log_local_cp, dt_bias_local_cp, alpha, beta):
            return npu_ops.gdn_gate(alpha, A_log_local_cp, dt_bias_local_cp, beta)
        return original(self, A_log_local_cp, dt_bias_local_cp, alpha, beta)

    return npu_ops_gate


def replace_gates(original: Callable) -> Callable:
    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_gates(self, A_log_local_cp, dt_bias_local_cp, batch, seq_len, *gate_feats):
        given = A_log_local_cp, dt_bias_local_cp
        if len(gate_feats) == 2:
            beta, alpha = gate_feats
            if _is_ours(*given, alpha, beta):
                g, beta = npu_ops.gdn_gate(alpha, *given, beta)
                return g, {"beta": beta}
        return original(self, *given, batch, seq_len, *gate_feats)

    return npu_ops_gates


def _is_ours(A_log, dt_bias, alpha, beta) -> bool:
    tensors = (A_log, dt_bias, alpha, beta)
    return (
        all(isinstance(x, torch.Tensor) and x.dtype in check.FLOATS for x in tensors)
        and torch.float64 not in (x.dtype for x in tensors)  # Megatron computes fp64 in fp32
        and all(x.device == alpha.device for x in tensors)
        and alpha.dim() > 0
        and alpha.shape == beta.shape
        and A_log.shape == dt_bias.shape == alpha.shape[-1:]
    )
