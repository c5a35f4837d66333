"""Declaration of bias_dropout_add: its arguments, outputs and implementations."""

from __future__ import annotations

import torch

from npu_ops.core import library
from npu_ops.core.operator import InPlace, Operator
from npu_ops.ops.bias_dropout_add import reference


def _gradient_outputs(inputs):
    """Allocate grad_x and, if wanted, the gradient of a [h] bias in fp32 (fp64 if `grad` is)."""
    grad, wide = inputs.grad, reference.compute_dtype(inputs.grad)
    row = torch.empty(grad.shape[-1:], dtype=wide, device=grad.device) if inputs.sum_rows else None
    return library.dense_like(grad, inputs.dtype), row


forward = Operator(
    "bias_dropout_add",
    "Tensor x, Tensor? bias, Tensor residual, Tensor? rng_state, float p -> out",
    shapes="ScalarType dtype",
    new=lambda inputs: library.dense_like(inputs.x, inputs.dtype),
    reference=reference.bias_dropout_add,
    ascendc=True,
)
in_place = InPlace(forward, over={"out": "x"}, elementwise=True)
backward = Operator(
    "bias_dropout_add_backward",
    "Tensor grad, Tensor? rng_state, float p -> grad_x, grad_bias?",
    op="bias_dropout_add",
    shapes="ScalarType dtype, bool sum_rows",
    new=_gradient_outputs,
    reference=reference.bias_dropout_add_backward,
    ascendc=True,
)
