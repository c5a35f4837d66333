"""Declaration of grouped_linear: its arguments, outputs and implementations."""

from __future__ import annotations

from npu_ops.core.library import dense_like
from npu_ops.core.operator import Backward, Operator
from npu_ops.core.rows import as_matrix, in_one_piece
from npu_ops.ops.grouped_linear import aclnn, groups, reference
from npu_ops.ops.linear import formats

_LAY_OUT = dict.fromkeys(("x", "grad"), as_matrix)
_LAY_OUT |= dict.fromkeys(("weight", "offs"), in_one_piece)


def _outputs(inputs):
    return inputs.x.new_empty((inputs.x.shape[0], inputs.weight.shape[1]))


def _gradients(inputs):
    return dense_like(inputs.x), dense_like(inputs.weight)


forward = Operator(
    "grouped_linear",
    "Tensor x, Tensor weight, Tensor offs -> out",
    new=_outputs,
    reference=formats.refused(reference.grouped_linear),
    lay_out=_LAY_OUT,
    why_not={"aclnn": aclnn.why_not, "triton_ascend": formats.against},
    aclnn="first",
    cpu_in_python=True,
    is_empty=lambda arguments: not (arguments.x.numel() and arguments.weight.numel()),
    empty=groups.nothing_to_add,
    check_indices=groups.check,
)
backward = Backward(
    forward,
    "Tensor grad, Tensor x, Tensor weight, Tensor offs -> grad_x, grad_weight",
    new=_gradients,
    reference=reference.grouped_linear_backward,
    lay_out=_LAY_OUT,
    aclnn="first",
    empty=groups.nothing_to_add,
)
