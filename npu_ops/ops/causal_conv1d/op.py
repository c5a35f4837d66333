"""causal_conv1d as torch operators: schemas, fake kernels, autograd, implementations."""

from __future__ import annotations

import torch

from npu_ops.core import library
from npu_ops.core.registry import Implementation, Table, from_module, from_native
from npu_ops.ops.causal_conv1d import reference


def triton_why_not(x, *rest) -> str | None:
    """None, or what the Triton kernels have against a call."""
    return library.triton_why_not() or library.dtype_why_not(x)


def cpu_why_not(x, *rest) -> str | None:
    """None, or what the native kernels have against a call."""
    return library.build_info()["why_not"] or library.dtype_why_not(x)


def implementations(op: str, name: str, native_schema: str, run_reference) -> list[Implementation]:
    """The implementations of `name`, an operator of `op`, in order of preference."""
    return [
        Implementation(
            "triton_ascend",
            from_module(f"npu_ops.ops.{op}.triton_ascend:{name}"),
            frozenset({"npu", "cuda"}),
            triton_why_not,
        ),
        Implementation("cpu", from_native(native_schema), frozenset({"cpu"}), cpu_why_not),
        Implementation("reference", lambda: run_reference, frozenset(), lambda *args: None),
    ]


def _reference(x, weight, bias, residual, initial_state, cu_seqlens, silu, y, final_state):
    arguments = (x, weight, bias, residual, initial_state, cu_seqlens, silu)
    y.copy_(reference.causal_conv1d(*arguments))
    if final_state is not None:
        width = weight.shape[1]
        final_state.copy_(reference.final_state(x, width, initial_state, cu_seqlens))


def _reference_backward(
    grad, grad_final, x, weight, bias, initial_state, cu_seqlens, silu,
    grad_x, grad_weight, grad_bias, grad_state,
):  # fmt: skip
    arguments = (grad, grad_final, x, weight, bias, initial_state, cu_seqlens, silu)
    outputs = (grad_x, grad_weight, grad_bias, grad_state)
    gradients = reference.causal_conv1d_backward(*arguments)
    for output, gradient in zip(outputs, gradients, strict=True):
        if output is not None:
            output.copy_(gradient)


forward_table = Table(
    "causal_conv1d",
    implementations(
        "causal_conv1d",
        "causal_conv1d",
        "causal_conv1d_cpu(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, "
        "Tensor? initial_state, Tensor? cu_seqlens, bool silu, Tensor(a!) y, "
        "Tensor(b!)? final_state) -> ()",
        _reference,
    ),
)
backward_table = Table(
    "causal_conv1d_backward",
    implementations(
        "causal_conv1d",
        "causal_conv1d_backward",
        "causal_conv1d_backward_cpu(Tensor grad, Tensor? grad_final, Tensor x, Tensor weight, "
        "Tensor? bias, Tensor? initial_state, Tensor? cu_seqlens, bool silu, Tensor(a!) grad_x, "
        "Tensor(b!) grad_weight, Tensor(c!)? grad_bias, Tensor(d!)? grad_state) -> ()",
        _reference_backward,
    ),
)


def rows_of(x):
    """x with each token's channels in one piece, as the kernels read it."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def channels_last(state):
    """A `[N, D, W]` state with D in one piece, as the kernels read it."""
    if state is None or state.stride(1) == 1:
        return state
    return state.transpose(1, 2).contiguous().transpose(1, 2)


def new_state(x, count: int, width: int):
    """An uninitialised `[count, D, W]` state of x's dtype with D in one piece."""
    return x.new_empty((count, width, x.shape[-1])).transpose(1, 2)


def sequences(x, cu_seqlens) -> int:
    """How many sequences x has."""
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _forward(x, weight, bias, residual, initial_state, cu_seqlens, silu, output_final_state):
    x, residual, initial_state = rows_of(x), rows_of(residual), channels_last(initial_state)
    outputs = _forward_outputs(x, weight, cu_seqlens, output_final_state)
    y, state = map(library.poisoned, outputs)
    arguments = (x, weight, bias, residual, initial_state, cu_seqlens, silu)
    final_state = state if output_final_state else None
    if x.numel():
        forward_table.run(*arguments, y, final_state)
    elif output_final_state:
        _reference(*arguments, y, final_state)
    return y, state


def _forward_fake(x, weight, bias, residual, initial_state, cu_seqlens, silu, output_final_state):
    return _forward_outputs(rows_of(x), weight, cu_seqlens, output_final_state)


def _forward_outputs(x, weight, cu_seqlens, output_final_state):
    """y, and the final state: empty where it is not wanted."""
    count = sequences(x, cu_seqlens) if output_final_state else 0
    return torch.empty_like(x), new_state(x, count, weight.shape[1])


def _save(ctx, inputs, output):
    x, weight, bias, residual, initial_state, cu_seqlens, ctx.silu, _ = inputs
    ctx.save_for_backward(x, weight, bias, initial_state, cu_seqlens)
    ctx.has_residual = residual is not None
    ctx.set_materialize_grads(False)


def _gradients(ctx, grad, grad_final):
    x, weight, bias, initial_state, cu_seqlens = ctx.saved_tensors
    residual = grad if ctx.has_residual else None
    if grad_final is not None and not grad_final.numel():
        grad_final = None
    grad = torch.zeros_like(x) if grad is None else grad
    gradients = library.call(
        "causal_conv1d_backward",
        grad,
        grad_final,
        x,
        weight,
        bias,
        initial_state,
        cu_seqlens,
        ctx.silu,
    )
    grad_x, grad_weight, grad_bias, grad_state = gradients
    return (
        grad_x, grad_weight, grad_bias if bias is not None else None, residual,
        grad_state if initial_state is not None else None, None, None, None,
    )  # fmt: skip


def _backward(grad, grad_final, x, weight, bias, initial_state, cu_seqlens, silu):
    grad, x, grad_final = rows_of(grad), rows_of(x), channels_last(grad_final)
    initial_state = channels_last(initial_state)
    outputs = tuple(map(library.poisoned, backward_outputs(x, weight, bias, initial_state)))
    wanted = (True, True, bias is not None, initial_state is not None)
    targets = [out if want else None for out, want in zip(outputs, wanted, strict=True)]
    arguments = (grad, grad_final, x, weight, bias, initial_state, cu_seqlens, silu)
    run = backward_table.run if x.numel() else _reference_backward
    run(*arguments, *targets)
    return outputs


def _backward_fake(grad, grad_final, x, weight, bias, initial_state, cu_seqlens, silu):
    return backward_outputs(rows_of(x), weight, bias, initial_state)


def backward_outputs(x, weight, bias, initial_state):
    """Uninitialised: like x, weight, bias and initial_state; empty where there is none."""
    grad_bias = x.new_empty(0) if bias is None else torch.empty_like(bias)
    count = 0 if initial_state is None else initial_state.shape[0]
    grad_state = new_state(x, count, weight.shape[1])
    return torch.empty_like(x), torch.empty_like(weight), grad_bias, grad_state


library.operator(
    "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, "
    "Tensor? initial_state, Tensor? cu_seqlens, bool silu, bool output_final_state) "
    "-> (Tensor, Tensor)",
    _forward,
    _forward_fake,
    _gradients,
    _save,
)
library.operator(
    "causal_conv1d_backward(Tensor grad, Tensor? grad_final, Tensor x, Tensor weight, "
    "Tensor? bias, Tensor? initial_state, Tensor? cu_seqlens, bool silu) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
    library.no_gradient("causal_conv1d"),
    lambda ctx, inputs, output: None,
)


def call(*args):
    """Run directly where nothing watches, else through torch."""
    if library.is_plain(*args[:6]):
        return _forward(*args)
    return library.call("causal_conv1d", *args)
