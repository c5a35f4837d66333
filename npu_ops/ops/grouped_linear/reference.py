"""Reference of grouped_linear, in plain PyTorch."""

from __future__ import annotations

from npu_ops.ops.grouped_linear import groups
from npu_ops.ops.linear.reference import compute_dtype


def grouped_linear(x, weight, offs):
    """Multiply each group's rows of x by its weight^T, in fp32 (fp64 for fp64 x)."""
    wide = compute_dtype(x)
    out = x.new_zeros((x.shape[0], weight.shape[1]), dtype=wide)
    ends = groups.clamped(offs, x.shape[0])
    for rows, matrix in zip(groups.spans(ends), weight, strict=True):
        out[rows] = x[rows].to(wide).mm(matrix.to(wide).t())
    groups.finish(offs, ends, out)
    return out


def grouped_linear_backward(grad, x, weight, offs):
    """Return the gradients of x and weight."""
    wide = compute_dtype(x)
    grad_x, grad_weight = (t.new_zeros(t.shape, dtype=wide) for t in (x, weight))
    ends = groups.clamped(offs, x.shape[0])
    for group, rows in enumerate(groups.spans(ends)):
        part = grad[rows].to(wide)
        grad_x[rows] = part.mm(weight[group].to(wide))
        grad_weight[group] = part.t().mm(x[rows].to(wide))
    groups.finish(offs, ends, grad_x, others=[grad_weight])
    return grad_x, grad_weight
