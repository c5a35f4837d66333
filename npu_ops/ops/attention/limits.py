"""What the Triton kernels do not take. Does not import triton."""

from __future__ import annotations

import torch

from npu_ops.core import library

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WIDEST = 256
_PAGE = 16  # the fewest keys that the matrix unit takes


def triton_why_not(q, k, v, extra, rule) -> str | None:
    """None, or a sentence on why the Triton kernels do not run a call."""
    for name, x in (("q", q), ("v", v)):
        if x.shape[3] > _WIDEST:
            return f"the head dimension of {name} is {x.shape[3]}, above {_WIDEST}"
    if q.dtype not in _DTYPES:
        return f"it has no {str(q.dtype).removeprefix('torch.')} kernel"
    if rule.dropout_p:
        return "it has no dropout"
    if extra.block_table is not None and k.shape[2] % _PAGE:
        return f"blocks of {k.shape[2]} keys are not a multiple of {_PAGE}"
    return library.triton_why_not()
