"""l2norm, declared: what it takes, what it writes, who computes it."""

from __future__ import annotations

from npu_ops.core.library import dense_like
from npu_ops.core.operator import Backward, Operator
from npu_ops.core.rows import as_rows
from npu_ops.ops.l2norm import reference

# The longest row that fits a vector core's memory, forward and backward.
_TRITON_WIDEST = 4096


def _too_wide(arguments) -> str | None:
    width = arguments.x.shape[-1]
    if width > _TRITON_WIDEST:
        return f"rows of {width} elements are longer than {_TRITON_WIDEST}"
    return None


def _rows(arguments):
    """Tensors as [outer, inner, D] with a contiguous last dimension."""
    x, eps, out = arguments
    x, out = as_rows([x], [out])
    return x, eps, out


def _backward_rows(arguments):
    grad, x, eps, grad_x = arguments
    grad, x, grad_x = as_rows([grad, x], [grad_x])
    return grad, x, eps, grad_x


forward = Operator(
    "l2norm",
    takes="Tensor x, float eps",
    shapes="ScalarType dtype",
    writes="out",
    new=lambda inputs: dense_like(inputs.x, inputs.dtype),
    reference=reference.l2norm,
    lay_out=_rows,
    why_not={"triton_ascend": _too_wide},
    ascendc=True,
)
backward = Backward(
    forward,
    takes="Tensor grad, Tensor x, float eps",
    writes="grad_x",
    new=lambda inputs: dense_like(inputs.x),
    reference=reference.l2norm_backward,
    lay_out=_backward_rows,
    why_not={"triton_ascend": _too_wide},
    ascendc=True,
)
