"""Declaration of l2norm: its arguments, outputs and implementations."""

from __future__ import annotations

from npu_ops.core.library import dense_like
from npu_ops.core.operator import Backward, Operator
from npu_ops.core.rows import lay_out_rows
from npu_ops.ops.l2norm import reference

forward = Operator(
    "l2norm",
    "Tensor x, float eps -> out",
    shapes="ScalarType dtype",
    new=lambda inputs: dense_like(inputs.x, inputs.dtype),
    reference=reference.l2norm,
    lay_out=lay_out_rows(["x"], ["out"]),
    ascendc=True,
)
backward = Backward(
    forward,
    "Tensor grad, Tensor x, float eps -> grad_x",
    new=lambda inputs: dense_like(inputs.x),
    reference=reference.l2norm_backward,
    lay_out=lay_out_rows(["grad", "x"], ["grad_x"]),
)
