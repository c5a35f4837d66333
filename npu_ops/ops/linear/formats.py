"""The vendor's formats of matrices, whose memory has no rows."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import is_fake

# Of torch_npu's enumeration: undefined, NCHW, NHWC, ND, NCDHW.
_WITH_ROWS = (-1, 0, 1, 2, 30)


def format_why_not(x: torch.Tensor) -> str | None:
    """None, or which format an NPU keeps a matrix in, if not in rows.

    Of what is traced nobody knows it: the graph asks again when it runs.
    """
    if x.device.type != "npu" or is_fake(x):
        return None
    from torch_npu import get_npu_format

    found = get_npu_format(x)
    return None if found in _WITH_ROWS else f"the vendor's format {found}"
