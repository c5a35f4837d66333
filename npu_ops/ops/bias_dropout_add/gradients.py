"""The gradients of bias_dropout_add, which `core.operator.Backward` cannot express.

The gradient of the residual is the output's gradient. A bias with x's shape has the same gradient
as x, in its own dtype. If nothing is dropped, torch computes the gradients, unless a `[h]` bias has
another dtype than the output. The backward is differentiable, too.
"""

from __future__ import annotations

import torch

from npu_ops.core import library
from npu_ops.ops.bias_dropout_add.op import backward, forward


def _dtype(x):
    return None if x is None else x.dtype


def _save(ctx, inputs, output):
    x, bias, residual, rng_state, ctx.p, _ = inputs
    ctx.save_for_backward(rng_state)
    ctx.dtypes = _dtype(x), _dtype(bias), _dtype(residual)
    ctx.bias_is_row = bias is not None and bias.dim() < x.dim()


def _gradients(ctx, grad):
    x_dtype, bias_dtype, residual_dtype = ctx.dtypes
    needs_x, needs_bias, needs_residual, *_ = ctx.needs_input_grad
    needs_row = needs_bias and ctx.bias_is_row
    grad_x = grad_bias = grad_residual = None
    if needs_residual:
        grad_residual = grad.to(residual_dtype)
    if needs_x or needs_row:
        grad_x, grad_bias = _of_sum(ctx, grad, x_dtype, bias_dtype if needs_row else None)
    if needs_bias and not needs_row:
        grad_bias = grad_x
        if not needs_x or bias_dtype != x_dtype:
            grad_bias, _ = _of_sum(ctx, grad, bias_dtype, None)
    return grad_x, grad_bias, grad_residual, None, None, None


def _of_sum(ctx, grad, dtype, row_dtype):
    """Return the gradient of x + bias, and its sum over rows unless row_dtype is None.

    If nothing is dropped, the gradient is `grad` itself. If the sum keeps grad's dtype, too, torch
    sums over rows and accumulates in as wide a dtype as our kernel.
    """
    (rng_state,) = ctx.saved_tensors
    if rng_state is None and row_dtype in (None, grad.dtype):
        leading = list(range(grad.dim() - 1))
        return grad.to(dtype), None if row_dtype is None else grad.sum(leading)
    found, row = backward(grad, rng_state, ctx.p, dtype, row_dtype is not None)
    return found, None if row_dtype is None else row.to(row_dtype)


def _save_backward(ctx, inputs, output):
    grad, rng_state, ctx.p, _, ctx.sum_rows = inputs
    ctx.save_for_backward(rng_state)
    ctx.dtype = grad.dtype


def _double_backward(ctx, grad_of_x, grad_of_bias):
    """Differentiate the backward: it is linear in `grad`, so this is the forward without a
    residual."""
    (rng_state,) = ctx.saved_tensors
    bias, residual = grad_of_bias if ctx.sum_rows else None, torch.zeros_like(grad_of_x)
    grad = forward(grad_of_x, bias, residual, rng_state, ctx.p, ctx.dtype)
    return grad, None, None, None, None


library.differentiable(forward.name, _gradients, _save)
library.differentiable(backward.name, _double_backward, _save_backward)
