"""Declaration of the chunked gated delta rule: its arguments, outputs and implementations."""

from __future__ import annotations

from npu_ops.core import library
from npu_ops.core.library import dense_like
from npu_ops.core.operator import Backward, Operator
from npu_ops.ops.chunk_gated_delta_rule import aclnn, fla_npu, reference
from npu_ops.ops.chunk_gated_delta_rule.limits import triton_why_not
from npu_ops.ops.fused_recurrent_gated_delta_rule import states

# g, beta and the states are fp32 (fp64 if q is). normalize: divide q and k by their norms.
_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state, "
    "Tensor? cu_seqlens, float scale, int chunk_size, bool state_v_first, bool normalize"
)


def _triton_keeps_no_states(arguments) -> str | None:
    """Return why Triton cannot return the states before all chunks, or None.

    Chunks need 32 tokens or more on every device: on Ascend950 the kernels compute chunks of at
    least 32 tokens, and store no state within a chunk.
    """
    if arguments.chunk_size < 32:
        return f"it returns states of chunks of 32 tokens or more, not {arguments.chunk_size}"
    return triton_why_not(arguments)


_WHY_NOT = {"triton_ascend": triton_why_not, "cpu": lambda _: library.native_why_not()}


def _outputs(x):
    return dense_like(x.v), states.new(x, x.g.dtype) if x.output_final_state else None


def _outputs_and_states(x):
    return dense_like(x.v), states.new(x, x.g.dtype), _states_before_chunks(x)


def _states_before_chunks(x):
    """Allocate the states before chunks; for packed sequences, the maximum number of chunks."""
    tokens = x.q.shape[1]
    count = x.q.shape[0] * -(-tokens // x.chunk_size)
    if x.cu_seqlens is not None:
        count = tokens // x.chunk_size + x.cu_seqlens.shape[0] - 1
    return states.several(x, count, x.g.dtype)


def _gradients(x):
    return tuple(map(dense_like, (x.q, x.k, x.v, x.g, x.beta, x.initial_state)))


forward = Operator(
    "chunk_gated_delta_rule",
    f"{_INPUTS} -> o, final_state?",
    shapes="bool output_final_state",
    new=_outputs,
    reference=reference.chunk_gated_delta_rule,
    why_not=_WHY_NOT | {"aclnn": aclnn.why_not, "fla_npu": fla_npu.why_not},
    aclnn="behind",
    fla_npu=True,
    empty=states.pass_on,
    check_indices=states.check_starts,
    cpu_in_python=True,
)
# The forward pass for serving: it also stores the state before each chunk, and has no gradient.
prefill = Operator(
    "chunk_gated_delta_rule_prefill",
    f"{_INPUTS} -> o, final_state, chunk_states",
    op="chunk_gated_delta_rule",
    new=_outputs_and_states,
    reference=reference.chunk_gated_delta_rule_prefill,
    why_not=_WHY_NOT | {"triton_ascend": _triton_keeps_no_states},
    empty=states.pass_on,
    zeroed=lambda inputs: inputs.cu_seqlens is not None or not inputs.q.shape[1],
    check_indices=states.check_starts,
    cpu_in_python=True,
)
backward = Backward(
    forward,
    f"Tensor grad_o, Tensor? grad_final_state, {_INPUTS} "
    "-> grad_q, grad_k, grad_v, grad_g, grad_beta, grad_initial_state?",
    new=_gradients,
    reference=reference.chunk_gated_delta_rule_backward,
    empty=states.pass_gradients_back,
)
