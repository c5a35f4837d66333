"""Declaration of gdn_gate: its arguments, outputs and implementations."""

from __future__ import annotations

import torch

from npu_ops.core.library import dense_like
from npu_ops.core.operator import Backward, Operator
from npu_ops.core.rows import as_matrix, output_matrix, rows_up_to
from npu_ops.ops.gdn_gate import reference
from npu_ops.ops.gdn_gate.softplus import plain_alone

_INPUTS = "Tensor a, Tensor A_log, Tensor? dt_bias, Tensor? b, float scale"
_INPUTS += ", float softplus_beta, float softplus_threshold"

# Tensors with a number per row and head become [rows, HV] with contiguous columns.
_LAY_OUT = dict.fromkeys(("a", "b", "grad_g", "grad_beta"), as_matrix)
_LAY_OUT |= dict.fromkeys(("g", "beta", "grad_a", "grad_b"), output_matrix)
_LAY_OUT |= dict.fromkeys(("A_log", "dt_bias"), torch.Tensor.contiguous)


def _against_ascendc(arguments) -> str | None:
    """Return why the AscendC kernel does not support a call, or None.

    The sums of more than 8192 heads do not fit a vector core's memory (csrc/gdn_gate).
    """
    return rows_up_to("a", 8192)(arguments) or plain_alone(arguments)


def _outputs(inputs):
    """Allocate g in fp32 or fp64, and beta in b's dtype."""
    wide = reference.g_dtype(inputs.a, inputs.A_log, inputs.dt_bias)
    return dense_like(inputs.a, wide), dense_like(inputs.b)


def _gradients(inputs):
    """Allocate the gradients. A_log's and dt_bias's are sums over rows, so in fp32 or fp64."""
    wide = reference.g_dtype(inputs.a, inputs.A_log, inputs.dt_bias)
    sums = dense_like(inputs.A_log, wide), dense_like(inputs.A_log, wide)
    return dense_like(inputs.a), *sums, dense_like(inputs.b)


forward = Operator(
    "gdn_gate",
    f"{_INPUTS} -> g, beta?",
    new=_outputs,
    reference=reference.gdn_gate,
    lay_out=_LAY_OUT,
    why_not={"ascendc": _against_ascendc},
    ascendc=True,
)
backward = Backward(
    forward,
    f"Tensor grad_g, Tensor? grad_beta, {_INPUTS} -> grad_a, grad_A_log, grad_dt_bias, grad_b?",
    new=_gradients,
    reference=reference.gdn_gate_backward,
)
