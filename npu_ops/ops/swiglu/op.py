"""Declaration of swiglu: its arguments, outputs and implementations."""

from __future__ import annotations

from npu_ops.core.library import dense_like
from npu_ops.core.operator import Backward, Operator
from npu_ops.core.rows import as_matrix, output_matrix
from npu_ops.ops.swiglu import aclnn, reference


def _out(inputs):
    gate, up = inputs
    return dense_like(gate if up is not None else gate.narrow(-1, 0, gate.shape[-1] // 2))


forward = Operator(
    "swiglu",
    "Tensor gate, Tensor? up -> out",
    new=_out,
    reference=reference.swiglu,
    lay_out={"gate": as_matrix, "up": as_matrix, "out": output_matrix},
    why_not={"aclnn": aclnn.why_not},
    aclnn="behind",
)
backward = Backward(
    forward,
    "Tensor grad, Tensor gate, Tensor? up -> grad_gate, grad_up?",
    new=lambda inputs: (dense_like(inputs.gate), dense_like(inputs.up)),
    reference=reference.swiglu_backward,
    lay_out={
        "grad": as_matrix, "gate": as_matrix, "up": as_matrix, "grad_gate": output_matrix,
        "grad_up": output_matrix,
    },
    why_not={"aclnn": aclnn.why_not},
    aclnn="behind",
)  # fmt: skip
