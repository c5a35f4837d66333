"""Computes causal_conv1d's forward with torch_npu's `npu_masked_causal_conv1d` on an Ascend950.

Its limits are from torch_npu's documentation. The operator has three taps. Gated Delta Net's
filters have four, so only other models use it. PyTorch then applies bias, activation and residual.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from npu_ops.core import check, hardware, socs
from npu_ops.core.library import torch_npu_why_not

_TAPS = 3


def why_not(arguments) -> str | None:
    """Return None, or why the operator does not support the arguments."""
    x, weight = arguments.x, arguments.weight
    if x.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != x.dtype:
        got = f"x is {check.short(x.dtype)} and weight {check.short(weight.dtype)}"
        return f"{got}, the vendor's operator takes one dtype, bfloat16 or float16"
    if weight.shape[1] > _TAPS:
        return f"the filter has {weight.shape[1]} taps, the vendor's operator has {_TAPS}"
    if arguments.initial_state is not None or arguments.final_state is not None:
        return "the vendor's operator supports no states"
    if arguments.cu_seqlens is not None:
        return "the vendor's operator takes no packed sequences"
    return _soc_why_not() or _missing()


@functools.cache
def _soc_why_not() -> str | None:
    soc = hardware.npu_name() or "unknown"
    return (
        None
        if socs.is_ascend950(soc)
        else f"the vendor's operator needs an Ascend950, this is {soc}"
    )


_missing = functools.partial(torch_npu_why_not, "npu_masked_causal_conv1d")


def causal_conv1d(
    x, weight, bias, residual, initial_state, cu_seqlens, silu, y, final_state
) -> None:  # fmt: skip
    """Write y."""
    taps = F.pad(weight, (_TAPS - weight.shape[1], 0)).t().contiguous()
    found = torch.ops.npu.npu_masked_causal_conv1d(x.transpose(0, 1), taps).transpose(0, 1).float()
    found = found if bias is None else found + bias.float()
    found = F.silu(found) if silu else found
    y.copy_(found if residual is None else found + residual.float())
