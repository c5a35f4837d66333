"""Declaration of the recurrent gated delta rule: its arguments, outputs and implementations."""

from __future__ import annotations

from npu_ops.core.library import dense_like
from npu_ops.core.operator import Backward, Operator
from npu_ops.ops.fused_recurrent_gated_delta_rule import reference, states

# beta is [B, T, HV, 1], or [B, T, HV, V] per value.
_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? gk, Tensor? gv, Tensor beta, "
    "Tensor? initial_state, Tensor? cu_seqlens, float scale, bool state_v_first"
)


def _wide(x):
    return reference.compute_dtype(x.q, x.k, x.v, x.g, x.gk, x.gv, x.beta, x.initial_state)


def _outputs(x):
    """Allocate o in v's dtype and the final states in fp32 or fp64."""
    return dense_like(x.v), states.new(x, _wide(x)) if x.output_final_state else None


def _gradients(x):
    """Allocate the gradients, all in fp32 or fp64."""
    tensors = x.q, x.k, x.v, x.g, x.gk, x.gv, x.beta, x.initial_state
    wide = _wide(x)
    return tuple(dense_like(tensor, wide) for tensor in tensors)


forward = Operator(
    "fused_recurrent_gated_delta_rule",
    f"{_INPUTS} -> o, final_state?",
    shapes="bool output_final_state",
    new=_outputs,
    reference=reference.fused_recurrent_gated_delta_rule,
    empty=states.pass_on,
    check_indices=states.check_starts,
)
backward = Backward(
    forward,
    f"Tensor grad_o, Tensor? grad_final_state, {_INPUTS} "
    "-> grad_q, grad_k, grad_v, grad_g?, grad_gk?, grad_gv?, grad_beta, grad_initial_state?",
    new=_gradients,
    reference=reference.fused_recurrent_gated_delta_rule_backward,
    empty=states.pass_gradients_back,
)
