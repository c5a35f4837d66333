"""Computes grouped_linear with one `linear` per group. triton_ascend.py also uses the backward."""

from __future__ import annotations

from npu_ops.ops.grouped_linear import groups
from npu_ops.ops.linear import linear

__all__ = ["grouped_linear", "grouped_linear_backward"]


def grouped_linear(x, weight, offs, out):
    """Write the product of each group's rows of x with the group's weight^T."""
    ends = groups.clamped(offs, x.shape[0])
    for rows, matrix in zip(groups.spans(ends), weight, strict=True):
        if rows.start < rows.stop:
            out[rows] = linear(x[rows], matrix)
    groups.finish(offs, ends, out)


def grouped_linear_backward(grad, x, weight, offs, grad_x, grad_weight):
    """Write the gradients. Reads the ends of groups on the host, so it waits for the device."""
    ends = groups.clamped(offs, x.shape[0])
    for group, rows in enumerate(groups.spans(ends)):
        part = grad[rows]
        if rows.start < rows.stop:
            grad_x[rows] = linear(part, weight[group].t())
        grad_weight[group] = linear(part.t(), x[rows].t())
    groups.finish(offs, ends, grad_x, others=[grad_weight])
