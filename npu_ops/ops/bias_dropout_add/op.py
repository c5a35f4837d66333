"""bias_dropout_add as torch operators: schemas, fake kernels, autograd, implementations."""

from __future__ import annotations

import torch

from npu_ops.core import check, library
from npu_ops.core.registry import Implementation, Table, from_module, from_native
from npu_ops.ops.bias_dropout_add import reference

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _kernel_why_not(*tensors) -> str | None:
    for tensor in tensors:
        if tensor is not None and tensor.dtype not in _KERNEL_DTYPES:
            return f"it has no {check.short(tensor.dtype)} kernel"
        if tensor is not None and not tensor.is_contiguous():
            return "a tensor is not contiguous"
    return None


def _triton_why_not(*tensors) -> str | None:
    return library.triton_why_not() or _kernel_why_not(*tensors)


def _cpu_why_not(*tensors) -> str | None:
    return library.build_info()["why_not"] or _kernel_why_not(*tensors)


def contiguous(*tensors):
    """The tensors, laid out as the kernels read them."""
    return (None if tensor is None else tensor.contiguous() for tensor in tensors)


def _reference(x, bias, residual, rng_state, p, out):
    out.copy_(reference.bias_dropout_add(x, bias, residual, rng_state, p, out.dtype))


def _reference_backward(grad, rng_state, p, grad_x, grad_bias):
    wide = reference.bias_dropout_add_backward(grad, rng_state, p)
    grad_x.copy_(wide)
    if grad_bias is not None:
        grad_bias.copy_(wide.flatten(0, -2).sum(0))


_TRITON = "npu_ops.ops.bias_dropout_add.triton_ascend"

forward_table = Table(
    "bias_dropout_add",
    [
        Implementation(
            "triton_ascend",
            from_module(f"{_TRITON}:bias_dropout_add"),
            frozenset({"npu", "cuda"}),
            lambda x, bias, residual, rng_state, p, out: _triton_why_not(x, bias, residual, out),
        ),
        Implementation(
            "cpu",
            from_native(
                "bias_dropout_add_cpu(Tensor x, Tensor? bias, Tensor residual, Tensor? rng_state, "
                "float p, Tensor(a!) out) -> ()"
            ),
            frozenset({"cpu"}),
            lambda x, bias, residual, rng_state, p, out: _cpu_why_not(x, bias, residual, out),
        ),
        Implementation("reference", lambda: _reference, frozenset(), lambda *args: None),
    ],
)

backward_table = Table(
    "bias_dropout_add_backward",
    [
        Implementation(
            "triton_ascend",
            from_module(f"{_TRITON}:bias_dropout_add_backward"),
            frozenset({"npu", "cuda"}),
            lambda grad, rng_state, p, grad_x, grad_bias: _triton_why_not(grad, grad_x),
        ),
        Implementation(
            "cpu",
            from_native(
                "bias_dropout_add_backward_cpu(Tensor grad, Tensor? rng_state, float p, "
                "Tensor(a!) grad_x, Tensor(b!)? grad_bias) -> ()"
            ),
            frozenset({"cpu"}),
            lambda grad, rng_state, p, grad_x, grad_bias: _cpu_why_not(grad, grad_x),
        ),
        Implementation("reference", lambda: _reference_backward, frozenset(), lambda *args: None),
    ],
)


def _forward(x, bias, residual, rng_state, p, dtype):
    x, bias, residual = contiguous(x, bias, residual)
    out = library.new_output(x, dtype)
    if x.numel():
        forward_table.run(x, bias, residual, rng_state, p, out)
    return out


def _forward_fake(x, bias, residual, rng_state, p, dtype):
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output):
    x, bias, residual, rng_state, p, _ = inputs
    ctx.save_for_backward(rng_state)
    ctx.p, ctx.x_dtype, ctx.residual_dtype = p, x.dtype, residual.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.bias_is_row = bias is not None and bias.dim() < x.dim()


def _gradients(ctx, grad):
    (rng_state,) = ctx.saved_tensors
    needs_x, needs_bias, needs_residual = ctx.needs_input_grad[:3]
    grad_x = grad_bias = None
    if needs_bias and ctx.bias_is_row:
        grad_x, grad_bias = _gradient_op(grad, rng_state, ctx.p, ctx.x_dtype, True)
        grad_bias = grad_bias.to(ctx.bias_dtype)
    elif needs_bias:
        grad_bias = _gradient_of_sum(grad, rng_state, ctx.p, ctx.bias_dtype)
        grad_x = grad_bias if ctx.bias_dtype == ctx.x_dtype else None
    if needs_x and grad_x is None:
        grad_x = _gradient_of_sum(grad, rng_state, ctx.p, ctx.x_dtype)
    grad_residual = grad.to(ctx.residual_dtype) if needs_residual else None
    return grad_x if needs_x else None, grad_bias, grad_residual, None, None, None


def _gradient_of_sum(grad, rng_state, p, dtype):
    """The gradient of x + bias; where nothing is dropped it is `grad` itself."""
    if rng_state is None:
        return grad.to(dtype)
    return _gradient_op(grad, rng_state, p, dtype, False)[0]


def _gradient_op(grad, rng_state, p, dtype, sum_rows):
    return library.call("bias_dropout_add_backward", grad, rng_state, p, dtype, sum_rows)


def _backward(grad, rng_state, p, dtype, sum_rows):
    grad = grad.contiguous()
    grad_x, grad_bias = _backward_outputs(library.new_output, grad, dtype, sum_rows)
    if grad.numel():
        backward_table.run(grad, rng_state, p, grad_x, grad_bias if sum_rows else None)
    else:
        grad_bias.zero_()
    return grad_x, grad_bias


def _backward_fake(grad, rng_state, p, dtype, sum_rows):
    grad = grad.contiguous()
    return _backward_outputs(torch.empty_like, grad, dtype, sum_rows)


def _backward_outputs(new, grad, dtype, sum_rows):
    """grad_x, and the bias gradient: fp32 [h], or empty where it is not wanted."""
    wide = reference.compute_dtype(grad)
    row = grad.new_empty((grad.shape[-1] if sum_rows else 0,), dtype=wide)
    return new(grad, dtype=dtype), new(row)


def _save_backward(ctx, inputs, output):
    grad, rng_state, p, _, ctx.sum_rows = inputs
    ctx.save_for_backward(rng_state)
    ctx.p, ctx.dtype = p, grad.dtype


def _double_backward(ctx, grad_of_x, grad_of_bias):
    """The backward is linear in `grad`: its gradient is the forward without a residual."""
    (rng_state,) = ctx.saved_tensors
    grad = library.call(
        "bias_dropout_add",
        grad_of_x,
        grad_of_bias if ctx.sum_rows else None,
        torch.zeros_like(grad_of_x),
        rng_state,
        ctx.p,
        ctx.dtype,
    )
    return grad, None, None, None, None


def _in_place(x, bias, residual, rng_state, p):
    if x.numel():
        bias, residual = contiguous(bias, residual)
        forward_table.run(x, bias, residual, rng_state, p, x)
        library.written(x)


library.operator(
    "bias_dropout_add(Tensor x, Tensor? bias, Tensor residual, Tensor? rng_state, float p, "
    "ScalarType dtype) -> Tensor",
    _forward,
    _forward_fake,
    _gradients,
    _save,
)
library.operator(
    "bias_dropout_add_backward(Tensor grad, Tensor? rng_state, float p, ScalarType dtype, "
    "bool sum_rows) -> (Tensor, Tensor)",
    _backward,
    _backward_fake,
    _double_backward,
    _save_backward,
)
library.operator(
    "bias_dropout_add_(Tensor(a!) x, Tensor? bias, Tensor residual, Tensor? rng_state, float p) "
    "-> ()",
    _in_place,
    lambda x, bias, residual, rng_state, p: None,
    elementwise=True,
)


def call(inplace: bool, x, bias, residual, rng_state, p, dtype):
    """Run directly where nothing watches, else through torch; in place or not."""
    plain = library.is_plain(x, bias, residual)
    if inplace:
        args = x, bias, residual, rng_state, p
        _in_place(*args) if plain else library.call("bias_dropout_add_", *args)
        return x
    args = x, bias, residual, rng_state, p, dtype
    return _forward(*args) if plain else library.call("bias_dropout_add", *args)
