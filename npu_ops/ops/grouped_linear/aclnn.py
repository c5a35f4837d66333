"""Computes grouped_linear with torch_npu's `npu_grouped_matmul`, forward and backward.

Its limits are from torch_npu's documentation. The operator does not write the rows after the last
group.
"""

from __future__ import annotations

import torch

from npu_ops.core import check, env
from npu_ops.core.library import call_torch_npu, torch_npu_why_not
from npu_ops.ops.grouped_linear import groups

_GROUPS = 1024
_BY_ROWS, _BY_SUMS = 0, 2  # group_type: the axis that groups divide


def why_not(arguments) -> str | None:
    """Return None, or a sentence on why the operator does not support the arguments."""
    x, weight = arguments.x, arguments.weight
    if env.settings.consistent and "out" in arguments._fields:
        return "its bits may depend on the number of rows"
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return (
            f"x is {check.short(x.dtype)}, the vendor's operator takes bfloat16, float16 or float32"
        )
    if weight.shape[0] > _GROUPS:
        return f"the vendor's operator takes at most {_GROUPS} groups, not {weight.shape[0]}"
    return torch_npu_why_not("npu_grouped_matmul", "group_list", "split_item", "group_type")


def grouped_linear(x, weight, offs, out) -> None:
    """Write the product of each group's rows of x with the group's weight^T."""
    ends = groups.clamped(offs, x.shape[0])
    out.copy_(_grouped(x, weight.transpose(1, 2), ends, _BY_ROWS))
    groups.finish(offs, ends, out)


def grouped_linear_backward(grad, x, weight, offs, grad_x, grad_weight) -> None:
    """Write the gradients of x and weight."""
    ends = groups.clamped(offs, x.shape[0])
    grad_x.copy_(_grouped(grad, weight, ends, _BY_ROWS))
    grad_weight.copy_(_grouped(grad.t(), x, ends, _BY_SUMS))
    groups.finish(offs, ends, grad_x, others=[grad_weight])


def _grouped(x, weight, ends, group_type):
    (found,) = call_torch_npu(
        "npu_grouped_matmul", [x], [weight], group_list=ends, group_type=group_type,
        split_item=2 if group_type == _BY_ROWS else 3, group_list_type=0,
    )  # fmt: skip
    return found
