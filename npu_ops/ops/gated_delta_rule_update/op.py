"""Declaration of Gated Delta Net's decoding step: its arguments, outputs and implementations."""

from __future__ import annotations

import torch

from npu_ops.core.library import dense_like
from npu_ops.core.operator import Operator
from npu_ops.ops.gated_delta_rule_update import aclnn, fla_npu, reference
from npu_ops.ops.gated_delta_rule_update.arguments import check_values
from npu_ops.ops.gdn_gate.softplus import plain_alone


def _rows(x):
    """Return x with all but its first dimension contiguous, as the kernels need."""
    return x if x[:1].is_contiguous() else x.contiguous()


def _against_ascendc(arguments) -> str | None:
    if arguments.A_log is None:
        return "the call passes computed gates, the kernel takes A_log and dt_bias"
    return plain_alone(arguments)


# The states and their indices may have any strides.
_CONTIGUOUS = (
    "A_log", "dt_bias", "cu_seqlens", "num_accepted_tokens", "intermediate_state_indices",
)  # fmt: skip

forward = Operator(
    "gated_delta_rule_update",
    "Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor? A_log, Tensor? dt_bias, "
    "Tensor(a!) state, Tensor state_indices, Tensor? cu_seqlens, Tensor? num_accepted_tokens, "
    "Tensor(b!)? intermediate_states, Tensor? intermediate_state_indices, float scale, "
    "bool normalize, bool state_v_first, bool update, float softplus_beta, "
    "float softplus_threshold -> o",
    new=lambda inputs: dense_like(inputs.v),
    reference=reference.gated_delta_rule_update,
    why_not={"ascendc": _against_ascendc, "aclnn": aclnn.why_not, "fla_npu": fla_npu.why_not},
    aclnn="behind",
    fla_npu=True,
    ascendc=True,
    check_indices=check_values,
    lay_out=dict.fromkeys(("q", "k", "v", "a", "b"), _rows)
    | dict.fromkeys(_CONTIGUOUS, torch.Tensor.contiguous),
)
