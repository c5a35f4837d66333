"""Declaration of linear: its arguments, outputs and implementations."""

from __future__ import annotations

from npu_ops.core.library import dense_like
from npu_ops.core.operator import Backward, Operator
from npu_ops.core.rows import as_matrix, in_one_piece, output_matrix
from npu_ops.ops.linear import formats, reference

_LAY_OUT = dict.fromkeys(("x", "grad"), as_matrix)
_LAY_OUT |= dict.fromkeys(("out", "grad_x"), output_matrix)
_LAY_OUT |= dict.fromkeys(("weight", "bias"), in_one_piece)


def _outputs(inputs):
    return inputs.x.new_empty((*inputs.x.shape[:-1], inputs.weight.shape[0]))


def _gradients(inputs):
    return dense_like(inputs.x), dense_like(inputs.weight), dense_like(inputs.bias)


def _nothing_to_add(arguments) -> bool:
    return not (arguments.x.numel() and arguments.weight.numel())


def _bias_alone(arguments) -> None:
    arguments.out.copy_(0 if arguments.bias is None else arguments.bias)


forward = Operator(
    "linear",
    "Tensor x, Tensor weight, Tensor? bias -> out",
    new=_outputs,
    reference=formats.refused(reference.linear),
    lay_out=_LAY_OUT,
    why_not={"triton_ascend": formats.against},
    is_empty=_nothing_to_add,
    empty=_bias_alone,
)
backward = Backward(
    forward,
    "Tensor grad, Tensor x, Tensor weight, Tensor? bias -> grad_x, grad_weight, grad_bias?",
    new=_gradients,
    reference=reference.linear_backward,
    lay_out=_LAY_OUT,
    is_empty=lambda arguments: False,
    cpu_in_python=True,
)
