"""Computes swiglu with torch_npu's `npu_swiglu`, which takes gate and up in one tensor."""

from __future__ import annotations

import torch

from npu_ops.core import env
from npu_ops.core.library import dtype_why_not, torch_npu_why_not


def why_not(arguments) -> str | None:
    """Return None, or a sentence on why the operator does not support the arguments."""
    if arguments.up is not None:
        return "gate and up are two tensors, the vendor's operator takes one"
    if env.settings.consistent:  # then npu_ops/consistent/norms.py replaces npu_swiglu
        return "NPU_OPS_CONSISTENT changes the rounding of torch_npu's operator"
    missing = map(torch_npu_why_not, ("npu_swiglu", "npu_swiglu_backward"))
    return dtype_why_not(*arguments) or next(filter(None, missing), None)


def swiglu(gate, up, out) -> None:
    """Write `out`; `up` is None."""
    out.copy_(torch.ops.npu.npu_swiglu(gate, -1))


def swiglu_backward(grad, gate, up, grad_gate, grad_up) -> None:
    """Write grad_gate; up and grad_up are None."""
    grad_gate.copy_(torch.ops.npu.npu_swiglu_backward(grad, gate, -1))
