"""Calls that the Triton kernels do not support. Does not import triton."""

from __future__ import annotations

from npu_ops.core import env, hardware
from npu_ops.ops.attention.plan import page_why_not
from npu_ops.ops.attention.table import OPERATORS

_WIDEST = next(row.largest for row in OPERATORS if row.runs == "triton_ascend")


def triton_why_not(arguments) -> str | None:
    """Return None, or why the Triton kernels do not support the arguments."""
    q, k = arguments.q, arguments.k
    for name, x in (("q", q), ("v", arguments.v)):
        if x.shape[3] > _WIDEST:
            return f"the head dimension of {name} is {x.shape[3]}, above {_WIDEST}"
    if arguments.extra.block_table is not None:
        return page_why_not(k.shape[2], hardware.soc(q.device), bool(env.settings.consistent))
    return None
