"""gdn_gate as torch operators: schemas, fake kernels, autograd, implementations."""

from __future__ import annotations

import torch

from npu_ops.core import library
from npu_ops.core.registry import Implementation, Table, from_module, from_native
from npu_ops.core.rows import as_matrix, output_matrix
from npu_ops.ops.gdn_gate import reference


def _triton_why_not(*tensors) -> str | None:
    return library.triton_why_not() or library.dtype_why_not(*tensors)


def _cpu_why_not(*tensors) -> str | None:
    return library.build_info()["why_not"] or library.dtype_why_not(*tensors)


def _reference(a, A_log, dt_bias, b, scale, g, beta):
    decay, step = reference.gdn_gate(a, A_log, dt_bias, b, scale)
    g.copy_(decay)
    if beta is not None:
        beta.copy_(step)


def _reference_backward(
    grad_g, grad_beta, a, A_log, dt_bias, b, scale, grad_a, grad_A_log, grad_dt_bias, grad_b
):
    outputs = grad_a, grad_A_log, grad_dt_bias, grad_b
    grads = reference.gdn_gate_backward(grad_g, grad_beta, a, A_log, dt_bias, b, scale)
    for output, grad in zip(outputs, grads, strict=True):
        if output is not None:
            output.copy_(grad)


_INPUTS = "Tensor a, Tensor A_log, Tensor? dt_bias, Tensor? b, float scale"

# a, b, the outputs like them and their gradients are [rows, HV] with contiguous columns.
forward_table = Table(
    "gdn_gate",
    [
        Implementation(
            "triton_ascend",
            from_module("npu_ops.ops.gdn_gate.triton_ascend:gdn_gate"),
            frozenset({"npu", "cuda"}),
            lambda a, A_log, dt_bias, b, *rest: _triton_why_not(a, A_log, dt_bias, b),
        ),
        Implementation(
            "cpu",
            from_native(f"gdn_gate_cpu({_INPUTS}, Tensor(a!) g, Tensor(b!)? beta) -> ()"),
            frozenset({"cpu"}),
            lambda a, A_log, dt_bias, b, *rest: _cpu_why_not(a, A_log, dt_bias, b),
        ),
        Implementation("reference", lambda: _reference, frozenset(), lambda *args: None),
    ],
)

backward_table = Table(
    "gdn_gate_backward",
    [
        Implementation(
            "triton_ascend",
            from_module("npu_ops.ops.gdn_gate.triton_ascend:gdn_gate_backward"),
            frozenset({"npu", "cuda"}),
            lambda grad_g, grad_beta, a, A_log, dt_bias, b, *rest: _triton_why_not(
                grad_g, a, A_log, dt_bias, b
            ),
        ),
        Implementation(
            "cpu",
            from_native(
                f"gdn_gate_backward_cpu(Tensor grad_g, Tensor? grad_beta, {_INPUTS}, "
                "Tensor(a!) grad_a, Tensor(b!) grad_A_log, Tensor(c!) grad_dt_bias, "
                "Tensor(d!)? grad_b) -> ()"
            ),
            frozenset({"cpu"}),
            lambda grad_g, grad_beta, a, A_log, dt_bias, b, *rest: _cpu_why_not(
                grad_g, a, A_log, dt_bias, b
            ),
        ),
        Implementation("reference", lambda: _reference_backward, frozenset(), lambda *args: None),
    ],
)


def implementation_args(a, A_log, dt_bias, b, scale, g, beta):
    """The forward's arguments as an implementation takes them; `beta` is not read without b."""
    beta = None if b is None else output_matrix(beta)
    return as_matrix(a), *_columns(A_log, dt_bias), as_matrix(b), scale, output_matrix(g), beta


def _columns(A_log, dt_bias):
    return A_log.contiguous(), None if dt_bias is None else dt_bias.contiguous()


def _forward(a, A_log, dt_bias, b, scale):
    g, beta = _outputs(library.new_output, a, A_log, dt_bias, b)
    if a.numel():
        forward_table.run(*implementation_args(a, A_log, dt_bias, b, scale, g, beta))
    return g, beta


def _forward_fake(a, A_log, dt_bias, b, scale):
    return _outputs(_empty, a, A_log, dt_bias, b)


def _outputs(new, a, A_log, dt_bias, b):
    """g, and beta: empty where there is no b."""
    dense = torch.contiguous_format
    g = new(a, reference.g_dtype(a, A_log, dt_bias), dense)
    return g, a.new_empty(0) if b is None else new(b, None, dense)


def _empty(like, dtype, memory_format):
    return torch.empty_like(like, dtype=dtype, memory_format=memory_format)


def _save(ctx, inputs, output):
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx, grad_g, grad_beta):
    a, A_log, dt_bias, b = ctx.saved_tensors
    grad_beta = None if b is None else grad_beta
    grad_a, grad_A_log, grad_dt_bias, grad_b = library.call(
        "gdn_gate_backward", grad_g, grad_beta, a, A_log, dt_bias, b, ctx.scale
    )
    grad_dt_bias = None if dt_bias is None else grad_dt_bias.to(dt_bias.dtype)
    return grad_a, grad_A_log.to(A_log.dtype), grad_dt_bias, None if b is None else grad_b, None


def _backward(grad_g, grad_beta, a, A_log, dt_bias, b, scale):
    outputs = _backward_outputs(library.new_output, a, A_log, dt_bias, b)
    grad_a, grad_A_log, grad_dt_bias, grad_b = outputs
    if not a.numel():
        grad_A_log.zero_(), grad_dt_bias.zero_()
        return outputs
    inputs = as_matrix(a), *_columns(A_log, dt_bias), as_matrix(b), scale
    grad_b = None if b is None else output_matrix(grad_b)
    sums = grad_A_log, grad_dt_bias
    backward_table.run(
        as_matrix(grad_g), as_matrix(grad_beta), *inputs, output_matrix(grad_a), *sums, grad_b
    )
    return outputs


def _backward_fake(grad_g, grad_beta, a, A_log, dt_bias, b, scale):
    return _backward_outputs(_empty, a, A_log, dt_bias, b)


def _backward_outputs(new, a, A_log, dt_bias, b):
    """The gradients; that of b is empty where there is none, the sums are wide."""
    dense, wide = torch.contiguous_format, reference.g_dtype(a, A_log, dt_bias)
    grad_b = a.new_empty(0) if b is None else new(b, None, dense)
    return new(a, None, dense), new(A_log, wide, dense), new(A_log, wide, dense), grad_b


library.operator(
    f"gdn_gate({_INPUTS}) -> (Tensor, Tensor)", _forward, _forward_fake, _gradients, _save
)
library.operator(
    f"gdn_gate_backward(Tensor grad_g, Tensor? grad_beta, {_INPUTS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
    library.no_gradient("gdn_gate_backward"),
)


def call(a, A_log, dt_bias, b, scale):
    """Run directly where nothing watches, else through torch; g, or g and beta."""
    args = a, A_log, dt_bias, b, scale
    plain = library.is_plain(a, A_log, dt_bias, b)
    g, beta = _forward(*args) if plain else library.call("gdn_gate", *args)
    return g if b is None else (g, beta)
