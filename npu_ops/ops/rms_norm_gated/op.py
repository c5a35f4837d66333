"""rms_norm_gated as torch operators: schemas, fake kernels, autograd, implementations."""

from __future__ import annotations

import torch

from npu_ops.core import check, library
from npu_ops.core.registry import Implementation, Table, from_module, from_native
from npu_ops.core.rows import as_matrix, as_rows, output_matrix
from npu_ops.ops.rms_norm_gated import reference

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _kernel_why_not(*tensors) -> str | None:
    for tensor in tensors:
        if tensor.dtype not in _KERNEL_DTYPES:
            return f"it has no {check.short(tensor.dtype)} kernel"
    return None


def _triton_why_not(x, weight, z, *rest) -> str | None:
    return library.triton_why_not() or _kernel_why_not(x, weight, z)


def _cpu_why_not(x, weight, z, *rest) -> str | None:
    if z.dtype != x.dtype:
        return f"x is {check.short(x.dtype)} and z is {check.short(z.dtype)}"
    return library.build_info()["why_not"] or _kernel_why_not(x, weight)


def _reference(x, weight, z, eps, norm_before_gate, activation, out):
    out.copy_(reference.rms_norm_gated(x, weight, z, eps, norm_before_gate, activation))


def _reference_backward(
    grad, x, weight, z, eps, norm_before_gate, activation, grad_x, grad_weight, grad_z
):
    grads = reference.rms_norm_gated_backward(grad, x, weight, z, eps, norm_before_gate, activation)
    grad_x.copy_(grads[0])
    grad_weight.copy_(grads[1].sum_to_size(weight.shape))
    grad_z.copy_(grads[2])


_SETTINGS = "float eps, bool norm_before_gate, str activation"

# Every tensor of an implementation is [outer, inner, D] with a contiguous last dimension, but
# weight and its gradient: they are [1, D], or [inner, D] where rows are groups of longer ones.
forward_table = Table(
    "rms_norm_gated",
    [
        Implementation(
            "triton_ascend",
            from_module("npu_ops.ops.rms_norm_gated.triton_ascend:rms_norm_gated"),
            frozenset({"npu", "cuda"}),
            _triton_why_not,
        ),
        Implementation(
            "cpu",
            from_native(
                f"rms_norm_gated_cpu(Tensor x, Tensor weight, Tensor z, {_SETTINGS}, "
                "Tensor(a!) out) -> ()"
            ),
            frozenset({"cpu"}),
            _cpu_why_not,
        ),
        Implementation("reference", lambda: _reference, frozenset(), lambda *args: None),
    ],
)

backward_table = Table(
    "rms_norm_gated_backward",
    [
        Implementation(
            "triton_ascend",
            from_module("npu_ops.ops.rms_norm_gated.triton_ascend:rms_norm_gated_backward"),
            frozenset({"npu", "cuda"}),
            lambda grad, *inputs: _triton_why_not(*inputs),
        ),
        Implementation(
            "cpu",
            from_native(
                f"rms_norm_gated_backward_cpu(Tensor grad, Tensor x, Tensor weight, Tensor z, "
                f"{_SETTINGS}, Tensor(a!) grad_x, Tensor(b!) grad_weight, Tensor(c!) grad_z) -> ()"
            ),
            frozenset({"cpu"}),
            lambda grad, *inputs: _cpu_why_not(*inputs),
        ),
        Implementation("reference", lambda: _reference_backward, frozenset(), lambda *args: None),
    ],
)


def as_groups(group_size, inputs, outputs):
    """The tensors as the implementations take them; `group_size` is that of the rows."""
    if group_size == inputs[0].shape[-1]:
        return as_rows(inputs, outputs)
    matrices = [*map(as_matrix, inputs), *map(output_matrix, outputs)]
    return [matrix.unflatten(1, (-1, group_size)) for matrix in matrices]


def weight_rows(weight, group_size):
    """weight as the implementations take it."""
    return weight.contiguous().view(-1, group_size)


def _forward(x, weight, z, eps, norm_before_gate, activation, group_size):
    out = library.new_output(x, None, torch.contiguous_format)
    if x.numel():
        rows, z_rows, out_rows = as_groups(group_size, [x, z], [out])
        w = weight_rows(weight, group_size)
        forward_table.run(rows, w, z_rows, eps, norm_before_gate, activation, out_rows)
    return out


def _forward_fake(x, weight, z, *settings):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output):
    *tensors, ctx.eps, ctx.norm_before_gate, ctx.activation, ctx.group_size = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx, grad):
    x, weight, z = ctx.saved_tensors
    grad_x, grad_weight, grad_z = library.call(
        "rms_norm_gated_backward",
        grad,
        x,
        weight,
        z,
        ctx.eps,
        ctx.norm_before_gate,
        ctx.activation,
        ctx.group_size,
    )
    return grad_x, grad_weight.to(weight.dtype), grad_z, None, None, None, None


def _backward(grad, x, weight, z, eps, norm_before_gate, activation, group_size):
    outputs = _backward_outputs(library.new_output, grad, x, weight, z)
    grad_x, grad_weight, grad_z = outputs
    if not x.numel():
        grad_weight.zero_()
        return outputs
    grad, x, z, to_x, to_z = as_groups(group_size, [grad, x, z], [grad_x, grad_z])
    weight, to_weight = (weight_rows(w, group_size) for w in (weight, grad_weight))
    settings = eps, norm_before_gate, activation
    backward_table.run(grad, x, weight, z, *settings, to_x, to_weight, to_z)
    return outputs


def _backward_fake(grad, x, weight, z, *settings):
    def new(like, dtype, memory_format):
        return torch.empty_like(like, dtype=dtype, memory_format=memory_format)

    return _backward_outputs(new, grad, x, weight, z)


def _backward_outputs(new, grad, x, weight, z):
    """The gradients; that of weight, a sum, is wide."""
    dense, wide = torch.contiguous_format, reference.compute_dtype(grad, x, weight, z)
    return new(x, None, dense), new(weight, wide, dense), new(z, None, dense)


library.operator(
    f"rms_norm_gated(Tensor x, Tensor weight, Tensor z, {_SETTINGS}, int group_size) -> Tensor",
    _forward,
    _forward_fake,
    _gradients,
    _save,
)
library.operator(
    "rms_norm_gated_backward(Tensor grad, Tensor x, Tensor weight, Tensor z, "
    f"{_SETTINGS}, int group_size) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
    library.no_gradient("rms_norm_gated_backward"),
)


def call(x, weight, z, *settings):
    """Run directly where nothing watches, else through torch."""
    if library.is_plain(x, weight, z):
        return _forward(x, weight, z, *settings)
    return library.call("rms_norm_gated", x, weight, z, *settings)
