"""Declaration of causal_conv1d_qkv: its arguments, outputs and implementations."""

from __future__ import annotations

from npu_ops.core.operator import Backward, Operator
from npu_ops.core.rows import in_one_piece
from npu_ops.ops.causal_conv1d import layout
from npu_ops.ops.causal_conv1d.arguments import narrow_alone
from npu_ops.ops.causal_conv1d_qkv import reference

# heads: [key heads, value heads, K, V]. eps: None skips the norm.
_INPUTS = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor? cu_seqlens, bool silu, "
    "float? eps, int[] heads"
)


def _heads_in_one_piece(grad):
    """Return `[B, T, heads, dim]` with each token's elements contiguous, as the kernels need."""
    whole = grad.stride(3) == 1 and grad.stride(2) == grad.shape[3]
    return grad if whole else grad.contiguous()


_LAY_OUT = {"x": in_one_piece} | (
    dict.fromkeys(("initial_state", "grad_final_state"), layout.channels_last)
    | dict.fromkeys(("grad_q", "grad_k", "grad_v"), _heads_in_one_piece)
)


def _outputs(inputs):
    """Allocate q and k `[B, T, HK, K]`, v `[B, T, HV, V]`, and the final state if wanted."""
    shapes = reference.shapes(inputs.heads)
    parts = (inputs.x.new_empty((*inputs.x.shape[:2], *shape)) for shape in shapes)
    return *parts, layout.final_state(inputs)


forward = Operator(
    "causal_conv1d_qkv",
    f"{_INPUTS} -> q, k, v, final_state?",
    shapes="bool output_final_state",
    new=_outputs,
    reference=reference.causal_conv1d_qkv,
    lay_out=_LAY_OUT,
    why_not={"triton_ascend": narrow_alone},
    empty=layout.no_tokens,
    check_indices=layout.check_starts,
)
backward = Backward(
    forward,
    f"Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor? grad_final_state, {_INPUTS} "
    "-> grad_x, grad_weight, grad_bias?, grad_initial_state?",
    new=layout.gradients,
    reference=reference.causal_conv1d_qkv_backward,
    empty=layout.no_tokens_backward,
)
