"""l2norm as torch operators: schemas, fake kernels, autograd, implementations."""

from __future__ import annotations

import torch

from npu_ops.core import library
from npu_ops.core.registry import Implementation, Table, from_module, from_native
from npu_ops.core.rows import as_rows
from npu_ops.ops.l2norm import reference

# The longest row that fits a vector core's memory, forward and backward.
_TRITON_WIDEST = 4096


def _triton_why_not(*tensors) -> str | None:
    width = tensors[0].shape[-1]
    if width > _TRITON_WIDEST:
        return f"rows of {width} elements are longer than {_TRITON_WIDEST}"
    return library.triton_why_not() or library.dtype_why_not(*tensors)


def _cpu_why_not(*tensors) -> str | None:
    return library.build_info()["why_not"] or library.dtype_why_not(*tensors)


def _reference(x, eps, out):
    out.copy_(reference.l2norm(x, eps, out.dtype))


def _reference_backward(grad, x, eps, grad_x):
    grad_x.copy_(reference.l2norm_backward(grad, x, eps))


# Every tensor of an implementation is [outer, inner, D] with a contiguous last dimension.
forward_table = Table(
    "l2norm",
    [
        Implementation(
            "triton_ascend",
            from_module("npu_ops.ops.l2norm.triton_ascend:l2norm"),
            frozenset({"npu", "cuda"}),
            lambda x, eps, out: _triton_why_not(x, out),
        ),
        Implementation(
            "cpu",
            from_native("l2norm_cpu(Tensor x, float eps, Tensor(a!) out) -> ()"),
            frozenset({"cpu"}),
            lambda x, eps, out: _cpu_why_not(x, out),
        ),
        Implementation("reference", lambda: _reference, frozenset(), lambda *args: None),
    ],
)

backward_table = Table(
    "l2norm_backward",
    [
        Implementation(
            "triton_ascend",
            from_module("npu_ops.ops.l2norm.triton_ascend:l2norm_backward"),
            frozenset({"npu", "cuda"}),
            lambda grad, x, eps, grad_x: _triton_why_not(grad, x),
        ),
        Implementation(
            "cpu",
            from_native(
                "l2norm_backward_cpu(Tensor grad, Tensor x, float eps, Tensor(a!) grad_x) -> ()"
            ),
            frozenset({"cpu"}),
            lambda grad, x, eps, grad_x: _cpu_why_not(grad, x),
        ),
        Implementation("reference", lambda: _reference_backward, frozenset(), lambda *args: None),
    ],
)


def _forward(x, eps, dtype):
    out = library.new_output(x, dtype, torch.contiguous_format)
    if x.numel():
        rows, out_rows = as_rows([x], [out])
        forward_table.run(rows, eps, out_rows)
    return out


def _forward_fake(x, eps, dtype):
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output):
    x, ctx.eps, _ = inputs
    ctx.save_for_backward(x)


def _gradients(ctx, grad):
    return library.call("l2norm_backward", grad, *ctx.saved_tensors, ctx.eps), None, None


def _backward(grad, x, eps):
    grad_x = library.new_output(x, None, torch.contiguous_format)
    if x.numel():
        grad_rows, rows, out_rows = as_rows([grad, x], [grad_x])
        backward_table.run(grad_rows, rows, eps, out_rows)
    return grad_x


def _backward_fake(grad, x, eps):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


library.operator(
    "l2norm(Tensor x, float eps, ScalarType dtype) -> Tensor",
    _forward,
    _forward_fake,
    _gradients,
    _save,
)
library.operator(
    "l2norm_backward(Tensor grad, Tensor x, float eps) -> Tensor",
    _backward,
    _backward_fake,
    library.no_gradient("l2norm_backward"),
)


def call(x, eps, dtype):
    """Run directly where nothing watches, else through torch."""
    if library.is_plain(x):
        return _forward(x, eps, dtype)
    return library.call("l2norm", x, eps, dtype)
