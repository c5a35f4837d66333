"""Computes causal_conv1d's forward with fla_npu's `npu_causal_conv1d`.

Its limits are from fla_npu's documentation of August 2026. This module was only ever tested with a
test double. It does not support packed sequences: fla_npu's operator takes their starts on the
host, so a call would wait for the device.
"""

from __future__ import annotations

import functools
import importlib

import torch

from npu_ops.core import check
from npu_ops.core.library import fla_npu_why_not

_MULTIPLE = 16  # the number of channels must be a multiple of this


def why_not(arguments) -> str | None:
    """Return None, or why the operator does not support the arguments."""
    x, parameters = arguments.x, (arguments.weight, arguments.bias)
    same = all(p is None or p.dtype == x.dtype for p in parameters)
    if x.dtype not in (torch.bfloat16, torch.float16) or not same:
        got = f"x is {check.short(x.dtype)} and weight {check.short(arguments.weight.dtype)}"
        return f"{got}, fla_npu's operator takes one dtype, bfloat16 or float16"
    if x.shape[2] % _MULTIPLE:
        return f"there are {x.shape[2]} channels, fla_npu's operator takes multiples of {_MULTIPLE}"
    if arguments.initial_state is not None or arguments.final_state is not None:
        return "states have one column per tap, the states of fla_npu's operator one column fewer"
    if arguments.cu_seqlens is not None:
        return "cu_seqlens are on the device, fla_npu's operator takes them on the host"
    return _missing()


_missing = functools.partial(
    fla_npu_why_not, "npu_causal_conv1d", "bias", "conv_states", "activation_mode", "run_mode"
)


def causal_conv1d(
    x, weight, bias, residual, initial_state, cu_seqlens, silu, y, final_state
) -> None:  # fmt: skip
    """Write y."""
    batch, _, channels = x.shape
    states = x.new_zeros((batch, weight.shape[1] - 1, channels))
    operators = importlib.import_module("fla_npu.ops.ascendc")
    found = operators.npu_causal_conv1d(
        x.contiguous(), weight.t().contiguous(), bias, states, activation_mode=int(silu), run_mode=0
    )
    y.copy_(found if residual is None else found.float() + residual.float())
