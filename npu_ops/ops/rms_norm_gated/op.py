"""rms_norm_gated, declared: what it takes, what it writes, who computes it."""

from __future__ import annotations

from npu_ops.core import check
from npu_ops.core.library import dense_like
from npu_ops.core.operator import Backward, Operator
from npu_ops.core.rows import as_matrix, as_rows, output_matrix
from npu_ops.ops.rms_norm_gated import reference

# The longest row whose sums fit a vector core's memory (csrc/rms_norm_gated).
_ASCENDC_WIDEST = 16384

# weight is [1, D], or [groups, D / groups] where x and z are normalised in groups.
_INPUTS = "Tensor x, Tensor weight, Tensor z, float eps, bool norm_before_gate, str activation"


def _lay_out(arguments):
    x, weight, z, *settings, out = arguments
    x, z, out = _groups(weight, [x, z], [out])
    return x, weight.contiguous(), z, *settings, out


def _lay_out_backward(arguments):
    grad, x, weight, z, *settings, grad_x, grad_weight, grad_z = arguments
    grad, x, z, grad_x, grad_z = _groups(weight, [grad, x, z], [grad_x, grad_z])
    return grad, x, weight.contiguous(), z, *settings, grad_x, grad_weight, grad_z


def _groups(weight, inputs, outputs):
    """As [outer, inner, D] with a contiguous last dimension; where there are groups, inner is
    their number."""
    if weight.shape[0] == 1:
        return as_rows(inputs, outputs)
    matrices = [*map(as_matrix, inputs), *map(output_matrix, outputs)]
    return [matrix.unflatten(1, weight.shape) for matrix in matrices]


def _mixed(arguments) -> str | None:
    x, z = check.short(arguments.x.dtype), check.short(arguments.z.dtype)
    return None if x == z else f"x is {x} and z is {z}"


def _too_wide(arguments) -> str | None:
    width = arguments.weight.shape[-1]
    if width > _ASCENDC_WIDEST:
        return f"rows of {width} elements are longer than {_ASCENDC_WIDEST}"
    return None


def _gradients(inputs):
    """That of weight, a sum, is wide."""
    wide = reference.compute_dtype(*inputs[:4])
    return dense_like(inputs.x), dense_like(inputs.weight, wide), dense_like(inputs.z)


forward = Operator(
    "rms_norm_gated",
    takes=_INPUTS,
    writes="out",
    new=lambda inputs: dense_like(inputs.x),
    reference=reference.rms_norm_gated,
    lay_out=_lay_out,
    why_not={"cpu": _mixed, "ascendc": _too_wide},
    ascendc=True,
)
backward = Backward(
    forward,
    takes=f"Tensor grad, {_INPUTS}",
    writes="grad_x, grad_weight, grad_z",
    new=_gradients,
    reference=reference.rms_norm_gated_backward,
    lay_out=_lay_out_backward,
    why_not={"cpu": _mixed, "ascendc": _too_wide},
    ascendc=True,
)
