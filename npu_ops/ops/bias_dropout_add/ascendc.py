"""bias_dropout_add by bias_dropout_add_ascendc.cpp in csrc. Definition: reference.py"""

from __future__ import annotations

import torch

from npu_ops.core import ascendc, library

library.define(
    "bias_dropout_add_ascendc(Tensor x, Tensor? bias, Tensor residual, Tensor? rng_state, float p, "
    "Tensor(a!) out, str binary, int cores, int ub_bytes) -> ()"
)
library.define(
    "bias_dropout_add_backward_ascendc(Tensor grad, Tensor? rng_state, float p, Tensor(a!) grad_x, "
    "Tensor(b!)? grad_bias, str binary, int cores, int ub_bytes) -> ()"
)


def bias_dropout_add(x, bias, residual, rng_state, p, out):
    """Write residual + dropout(x + bias) to `out`; the arguments are the operator's."""
    target = ascendc.target("bias_dropout_add", x.device)
    torch.ops.npu_ops.bias_dropout_add_ascendc(x, bias, residual, rng_state, p, out, *target)


def bias_dropout_add_backward(grad, rng_state, p, grad_x, grad_bias):
    """Write the gradient of x, and of a [h] bias unless grad_bias is None."""
    target = ascendc.target("bias_dropout_add", grad.device)
    torch.ops.npu_ops.bias_dropout_add_backward_ascendc(
        grad, rng_state, p, grad_x, grad_bias, *target
    )
