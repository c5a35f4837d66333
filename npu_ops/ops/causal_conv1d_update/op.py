"""Declaration of causal_conv1d_update: its arguments, outputs and implementations."""

from __future__ import annotations

import torch

from npu_ops.core.operator import Operator
from npu_ops.core.rows import in_one_piece, like_one_piece
from npu_ops.ops.causal_conv1d.arguments import narrow_alone
from npu_ops.ops.causal_conv1d_update import reference

_INTEGERS = ("indices", "accepted", "starts", "window_indices")


def _why_not_ascendc(arguments) -> str | None:
    """Return why the AscendC kernel does not support a call, or None.

    The kernel needs at most 4 taps and, to copy a tensor, contiguous channels or columns.
    """
    for name in ("weight", "conv_state", "window"):
        tensor = getattr(arguments, name)
        if tensor is not None and 1 not in tensor.stride()[-2:]:
            return f"neither channels nor columns of {name} are contiguous"
    return narrow_alone(arguments)


# `lay_out` leaves conv_state and window as they are: kernels update them in place, by strides.
forward = Operator(
    "causal_conv1d_update",
    "Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, Tensor? indices, "
    "Tensor? accepted, Tensor? starts, Tensor(b!)? window, Tensor? window_indices, int pad, "
    "bool silu, bool update -> y",
    new=lambda inputs: like_one_piece(inputs.x),
    reference=reference.causal_conv1d_update,
    lay_out={"x": in_one_piece} | dict.fromkeys((*_INTEGERS, "bias"), torch.Tensor.contiguous),
    why_not={"ascendc": _why_not_ascendc, "triton_ascend": narrow_alone},
    ascendc=True,
    check_indices=reference.check_indices,
    zeroed=lambda inputs: inputs.starts is not None,
)
