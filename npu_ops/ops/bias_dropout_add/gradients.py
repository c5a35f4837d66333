"""The gradients of bias_dropout_add, which `Backward` does not write.

The residual's is the output's own. That of a bias of x's shape is x's, in the bias's dtype. Where
nothing is dropped, no kernel runs. And the gradient has a gradient.
"""

from __future__ import annotations

import torch

from npu_ops.core import library
from npu_ops.core.operator import as_dtype
from npu_ops.ops.bias_dropout_add.op import backward, forward


def _dtype(x):
    return None if x is None else x.dtype


def _save(ctx, inputs, output):
    x, bias, residual, rng_state, ctx.p, _ = inputs
    ctx.save_for_backward(rng_state)
    ctx.dtypes = _dtype(x), _dtype(bias), _dtype(residual)
    ctx.bias_is_row = bias is not None and bias.dim() < x.dim()


def _gradients(ctx, grad):
    return _found(ctx, grad, _Computed(ctx, grad))


def _write(recipe, ctx, grads):
    """`_gradients` as a recipe: `grad` is its first value, what was saved follows."""
    try:
        return _found(ctx, 0, _Written(recipe, ctx, *grads))
    except LookupError:
        return None


def _found(ctx, grad, by: _Computed | _Written):
    """The gradients of all inputs."""
    x_dtype, bias_dtype, residual_dtype = ctx.dtypes
    needs_x, needs_bias, needs_residual, *_ = ctx.needs_input_grad
    needs_row = needs_bias and ctx.bias_is_row
    grad_x = grad_bias = grad_residual = None
    if needs_residual:
        grad_residual = by.cast(grad, residual_dtype)
    if needs_x or needs_row:
        grad_x, grad_bias = _of_sum(by, grad, x_dtype, bias_dtype if needs_row else None)
    if needs_bias and not needs_row:
        grad_bias = grad_x
        if not needs_x or bias_dtype != x_dtype:
            grad_bias, _ = _of_sum(by, grad, bias_dtype, None)
    return grad_x, grad_bias, grad_residual, None, None, None


def _of_sum(by: _Computed | _Written, grad, dtype, row_dtype):
    """The gradient of x + bias, and its sum over rows unless row_dtype is None.

    Where nothing is dropped it is `grad` itself, and torch adds rows as wide as our kernel does.
    """
    if not by.drops and row_dtype in (None, by.grad.dtype):
        return by.cast(grad, dtype), None if row_dtype is None else by.sum_of_rows(grad)
    found, row = by.backward(grad, dtype, row_dtype is not None)
    return found, None if row_dtype is None else by.cast(row, row_dtype)


class _Computed:
    """How gradients are computed."""

    def __init__(self, ctx, grad):
        self.grad, self._p = grad, ctx.p
        (self._rng_state,) = ctx.saved_tensors
        self.drops = self._rng_state is not None

    cast = staticmethod(as_dtype)

    def sum_of_rows(self, grad):
        """Over all dimensions but the last: torch adds in fp32 and rounds once."""
        return grad.sum(self.leading)

    @property
    def leading(self) -> list[int]:
        return list(range(self.grad.dim() - 1))

    def backward(self, grad, dtype, sum_rows):
        return backward(*self._inputs(dtype, sum_rows))

    def _inputs(self, dtype, sum_rows):
        return self.grad, self._rng_state, self._p, dtype, sum_rows


class _Written(_Computed):
    """The same as steps of a recipe, in which tensors are places."""

    def __init__(self, recipe, ctx, grad):
        super().__init__(ctx, grad)
        self._recipe, self.cast = recipe, recipe.cast

    def sum_of_rows(self, grad):
        total = torch.ops.aten.sum.dim_IntList
        return self._recipe.call(total, None, self.leading, False, None, values={0: grad})

    def backward(self, grad, dtype, sum_rows):
        plan = backward.plan_of(self._inputs(dtype, sum_rows))
        if plan is None or not plan.in_cpp:
            raise LookupError
        return plan.write(self._recipe, [grad, 1 if self.drops else None])


def _save_backward(ctx, inputs, output):
    grad, rng_state, ctx.p, _, ctx.sum_rows = inputs
    ctx.save_for_backward(rng_state)
    ctx.dtype = grad.dtype


def _double_backward(ctx, grad_of_x, grad_of_bias):
    """The backward is linear in `grad`: its gradient is the forward without a residual."""
    (rng_state,) = ctx.saved_tensors
    bias, residual = grad_of_bias if ctx.sum_rows else None, torch.zeros_like(grad_of_x)
    grad = forward(grad_of_x, bias, residual, rng_state, ctx.p, ctx.dtype)
    return grad, None, None, None, None


library.differentiable(forward.name, _gradients, _save, _write)
library.differentiable(backward.name, _double_backward, _save_backward)
