"""Declarations of rms_norm and add_rms_norm: their arguments, outputs and implementations."""

from __future__ import annotations

from npu_ops.core.library import dense_like
from npu_ops.core.operator import Backward, Operator
from npu_ops.core.rows import lay_out_rows
from npu_ops.ops.rms_norm import reference

_SETTINGS = "Tensor weight, float eps, bool zero_centered"


def _gradients(inputs):
    """Allocate the gradients. The gradient of weight, a sum over rows, is fp32 or fp64."""
    *_, x, weight, _, _ = inputs
    return dense_like(x), dense_like(weight, reference.compute_dtype(x, weight))


def _lay_out_gradients(arguments):
    """Lay out the arguments as rows. grad_total is None if the caller did not use the sum."""
    unused = arguments.grad_total is None
    given = ["grad_out", "total"] if unused else ["grad_out", "grad_total", "total"]
    return lay_out_rows(given, ["grad_x"], groups="weight")(arguments)


forward = Operator(
    "rms_norm",
    f"Tensor x, {_SETTINGS} -> out",
    new=lambda inputs: dense_like(inputs.x),
    reference=reference.rms_norm,
    lay_out=lay_out_rows(["x"], ["out"], groups="weight"),
)
backward = Backward(
    forward,
    f"Tensor grad, Tensor x, {_SETTINGS} -> grad_x, grad_weight",
    new=_gradients,
    reference=reference.rms_norm_backward,
    lay_out=lay_out_rows(["grad", "x"], ["grad_x"], groups="weight"),
)
add_forward = Operator(
    "add_rms_norm",
    f"Tensor x, Tensor residual, {_SETTINGS} -> out, total",
    op="rms_norm",
    new=lambda inputs: (dense_like(inputs.x), dense_like(inputs.x)),
    reference=reference.add_rms_norm,
    lay_out=lay_out_rows(["x", "residual"], ["out", "total"], groups="weight"),
)
# The backward needs weight and total = x + residual, so x, residual and out are not saved.
add_backward = Backward(
    add_forward,
    f"Tensor grad_out, Tensor? grad_total, Tensor total, {_SETTINGS} -> grad_x, grad_weight",
    passed={"residual": "x"},
    new=_gradients,
    reference=reference.add_rms_norm_backward,
    lay_out=_lay_out_gradients,
)
