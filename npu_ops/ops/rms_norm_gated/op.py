"""Declaration of rms_norm_gated: its arguments, outputs and implementations."""

from __future__ import annotations

from npu_ops.core import check
from npu_ops.core.library import dense_like
from npu_ops.core.operator import Backward, Operator
from npu_ops.core.rows import lay_out_rows, rows_up_to
from npu_ops.ops.rms_norm_gated import reference

# The sums of longer rows do not fit into a vector core's memory (csrc/rms_norm_gated).
_up_to_16384 = rows_up_to("weight", 16384)

# weight is [D], or [groups, D / groups] if x and z are normalized in groups.
_INPUTS = "Tensor x, Tensor weight, Tensor z, float eps, bool norm_before_gate, str activation"


def _mixed(arguments) -> str | None:
    x, z = check.short(arguments.x.dtype), check.short(arguments.z.dtype)
    return None if x == z else f"x is {x} and z is {z}"


def _gradients(inputs):
    """Allocate the gradients. The gradient of weight, a sum over rows, is fp32 or fp64."""
    wide = reference.compute_dtype(*inputs[:4])
    return dense_like(inputs.x), dense_like(inputs.weight, wide), dense_like(inputs.z)


forward = Operator(
    "rms_norm_gated",
    f"{_INPUTS} -> out",
    new=lambda inputs: dense_like(inputs.x),
    reference=reference.rms_norm_gated,
    lay_out=lay_out_rows(["x", "z"], ["out"], groups="weight"),
    why_not={"cpu": _mixed, "ascendc": _up_to_16384},
    ascendc=True,
)
backward = Backward(
    forward,
    f"Tensor grad, {_INPUTS} -> grad_x, grad_weight, grad_z",
    new=_gradients,
    reference=reference.rms_norm_gated_backward,
    lay_out=lay_out_rows(["grad", "x", "z"], ["grad_x", "grad_z"], groups="weight"),
)
