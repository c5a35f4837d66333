"""Declaration of causal_conv1d: its arguments, outputs and implementations."""

from __future__ import annotations

from npu_ops.core.operator import Backward, Operator
from npu_ops.core.rows import in_one_piece, like_one_piece
from npu_ops.ops.causal_conv1d import aclnn, fla_npu, layout, reference

_LAY_OUT = (
    dict.fromkeys(("x", "residual", "grad_y"), in_one_piece)
    | dict.fromkeys(("initial_state", "grad_final_state"), layout.channels_last)
)  # fmt: skip

forward = Operator(
    "causal_conv1d",
    "Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor? initial_state, "
    "Tensor? cu_seqlens, bool silu -> y, final_state?",
    shapes="bool output_final_state",
    new=lambda inputs: (like_one_piece(inputs.x), layout.final_state(inputs)),
    reference=reference.with_final_state,
    lay_out=_LAY_OUT,
    why_not={"aclnn": aclnn.why_not, "fla_npu": fla_npu.why_not},
    aclnn="behind",
    fla_npu=True,
    empty=layout.no_tokens,
    check_indices=layout.check_starts,
)
backward = Backward(
    forward,
    "Tensor grad_y, Tensor? grad_final_state, Tensor x, Tensor weight, Tensor? bias, "
    "Tensor? initial_state, Tensor? cu_seqlens, bool silu "
    "-> grad_x, grad_weight, grad_bias?, grad_initial_state?",
    new=layout.gradients,
    reference=reference.causal_conv1d_backward,
    empty=layout.no_tokens_backward,
    passed={"residual": "y"},
)
