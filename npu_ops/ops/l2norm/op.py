"""l2norm, declared: what it takes, what it writes, who computes it."""

from __future__ import annotations

from npu_ops.core.library import dense_like
from npu_ops.core.operator import Backward, Operator
from npu_ops.core.rows import lay_out_rows, rows_up_to
from npu_ops.ops.l2norm import reference

# The longest row that fits a vector core's memory, forward and backward.
_up_to_4096 = rows_up_to("x", 4096)

forward = Operator(
    "l2norm",
    takes="Tensor x, float eps",
    shapes="ScalarType dtype",
    writes="out",
    new=lambda inputs: dense_like(inputs.x, inputs.dtype),
    reference=reference.l2norm,
    lay_out=lay_out_rows(["x"], ["out"]),
    why_not={"triton_ascend": _up_to_4096},
    ascendc=True,
)
backward = Backward(
    forward,
    takes="Tensor grad, Tensor x, float eps",
    writes="grad_x",
    new=lambda inputs: dense_like(inputs.x),
    reference=reference.l2norm_backward,
    lay_out=lay_out_rows(["grad", "x"], ["grad_x"]),
    why_not={"triton_ascend": _up_to_4096},
    ascendc=True,
)
