"""Declaration of Kimi Delta Attention: its arguments, outputs and implementations."""

from __future__ import annotations

from npu_ops.core import library
from npu_ops.core.library import dense_like
from npu_ops.core.operator import Backward, Operator
from npu_ops.ops.chunk_gated_delta_rule.limits import triton_why_not
from npu_ops.ops.chunk_kda import reference
from npu_ops.ops.fused_recurrent_gated_delta_rule import states

# g, beta and the states are fp32 (fp64 if q is). normalize: divide q and k by their norms.
_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state, "
    "Tensor? cu_seqlens, float scale, int chunk_size, bool state_v_first, bool normalize"
)


def _outputs(x):
    return dense_like(x.v), states.new(x, x.g.dtype) if x.output_final_state else None


def _gradients(x):
    return tuple(map(dense_like, (x.q, x.k, x.v, x.g, x.beta, x.initial_state)))


forward = Operator(
    "chunk_kda",
    f"{_INPUTS} -> o, final_state?",
    shapes="bool output_final_state",
    new=_outputs,
    reference=reference.chunk_kda,
    why_not={"triton_ascend": triton_why_not, "cpu": lambda _: library.native_why_not()},
    empty=states.pass_on,
    check_indices=states.check_starts,
    cpu_in_python=True,
)
backward = Backward(
    forward,
    f"Tensor grad_o, Tensor? grad_final_state, {_INPUTS} "
    "-> grad_q, grad_k, grad_v, grad_g, grad_beta, grad_initial_state?",
    new=_gradients,
    reference=reference.chunk_kda_backward,
    empty=states.pass_gradients_back,
)
