"""causal_conv1d_qkv as torch operators: schemas, fake kernels, autograd, implementations."""

from __future__ import annotations

from npu_ops.core import library
from npu_ops.core.registry import Table
from npu_ops.ops.causal_conv1d import op as conv
from npu_ops.ops.causal_conv1d import reference as conv_reference
from npu_ops.ops.causal_conv1d_qkv import reference


def _reference(x, weight, bias, initial_state, cu_seqlens, silu, eps, q, k, v, final_state):
    outputs = (q, k, v)
    arguments = (x, weight, bias, initial_state, cu_seqlens, silu, eps)
    parts = reference.causal_conv1d_qkv(*arguments, *outputs)
    for output, part in zip(outputs, parts, strict=True):
        output.copy_(part)
    if final_state is not None:
        width = weight.shape[1]
        final_state.copy_(conv_reference.final_state(x, width, initial_state, cu_seqlens))


def _reference_backward(*args):
    *arguments, grad_x, grad_weight, grad_bias, grad_state = args
    outputs = (grad_x, grad_weight, grad_bias, grad_state)
    gradients = reference.causal_conv1d_qkv_backward(*arguments)
    for output, gradient in zip(outputs, gradients, strict=True):
        if output is not None:
            output.copy_(gradient)


_INPUTS = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor? cu_seqlens, bool silu, "
    "float? eps"
)
_GRADS = "Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor? grad_final"

# q, k and v are [B, T, heads, dim]; eps is None where nothing is normalised.
forward_table = Table(
    "causal_conv1d_qkv",
    conv.implementations(
        "causal_conv1d_qkv",
        "causal_conv1d_qkv",
        f"causal_conv1d_qkv_cpu({_INPUTS}, Tensor(a!) q, Tensor(b!) k, Tensor(c!) v, "
        "Tensor(d!)? final_state) -> ()",
        _reference,
    ),
)
backward_table = Table(
    "causal_conv1d_qkv_backward",
    conv.implementations(
        "causal_conv1d_qkv",
        "causal_conv1d_qkv_backward",
        f"causal_conv1d_qkv_backward_cpu({_GRADS}, {_INPUTS}, Tensor(a!) grad_x, "
        "Tensor(b!) grad_weight, Tensor(c!)? grad_bias, Tensor(d!)? grad_state) -> ()",
        _reference_backward,
    ),
)


def _forward(x, weight, bias, initial_state, cu_seqlens, silu, eps, heads, output_final_state):
    x, initial_state = conv.rows_of(x), conv.channels_last(initial_state)
    made = _outputs(x, weight, cu_seqlens, heads, output_final_state)
    *outputs, state = map(library.poisoned, made)
    final_state = state if output_final_state else None
    run = forward_table.run if x.numel() else _reference
    run(x, weight, bias, initial_state, cu_seqlens, silu, eps, *outputs, final_state)
    return *outputs, state


def _forward_fake(
    x, weight, bias, initial_state, cu_seqlens, silu, eps, heads, output_final_state
):  # fmt: skip
    return _outputs(x, weight, cu_seqlens, heads, output_final_state)


def _outputs(x, weight, cu_seqlens, heads, output_final_state):
    """Uninitialised q, k, v and final state: empty where it is not wanted."""
    count = conv.sequences(x, cu_seqlens) if output_final_state else 0
    parts = (x.new_empty((*x.shape[:2], *shape)) for shape in part_shapes(heads))
    return *parts, conv.new_state(x, count, weight.shape[1])


def part_shapes(heads):
    """(heads, dim) of q, k and v, from (key heads, value heads, key dim, value dim)."""
    key_heads, value_heads, key_dim, value_dim = heads
    return (key_heads, key_dim), (key_heads, key_dim), (value_heads, value_dim)


def _save(ctx, inputs, output):
    x, weight, bias, initial_state, cu_seqlens, ctx.silu, ctx.eps, ctx.heads, _ = inputs
    ctx.save_for_backward(x, weight, bias, initial_state, cu_seqlens)
    ctx.set_materialize_grads(False)


def _gradients(ctx, *grads):
    *grads, grad_final = grads
    x, weight, bias, initial_state, cu_seqlens = ctx.saved_tensors
    if grad_final is not None and not grad_final.numel():
        grad_final = None
    grads = [
        x.new_zeros((*x.shape[:2], *shape)) if grad is None else grad
        for grad, shape in zip(grads, part_shapes(ctx.heads), strict=True)
    ]
    grad_x, grad_weight, grad_bias, grad_state = library.call(
        "causal_conv1d_qkv_backward",
        *grads,
        grad_final,
        x,
        weight,
        bias,
        initial_state,
        cu_seqlens,
        ctx.silu,
        ctx.eps,
    )
    return (
        grad_x, grad_weight, grad_bias if bias is not None else None,
        grad_state if initial_state is not None else None, None, None, None, None, None,
    )  # fmt: skip


def _backward(
    grad_q, grad_k, grad_v, grad_final, x, weight, bias, initial_state, cu_seqlens, silu, eps
):  # fmt: skip
    grads = [_heads_in_one_piece(grad) for grad in (grad_q, grad_k, grad_v)]
    grad_final, initial_state = conv.channels_last(grad_final), conv.channels_last(initial_state)
    x = conv.rows_of(x)
    outputs = tuple(map(library.poisoned, conv.backward_outputs(x, weight, bias, initial_state)))
    wanted = (True, True, bias is not None, initial_state is not None)
    targets = [out if want else None for out, want in zip(outputs, wanted, strict=True)]
    run = backward_table.run if x.numel() else _reference_backward
    inputs = (x, weight, bias, initial_state, cu_seqlens, silu, eps)
    run(*grads, grad_final, *inputs, *targets)
    return outputs


def _heads_in_one_piece(grad):
    """`[B, T, heads, dim]` with each token's elements in one piece, as the kernels read it."""
    whole = grad.stride(3) == 1 and grad.stride(2) == grad.shape[3]
    return grad if whole else grad.contiguous()


def _backward_fake(
    grad_q, grad_k, grad_v, grad_final, x, weight, bias, initial_state, cu_seqlens, silu, eps
):  # fmt: skip
    return conv.backward_outputs(conv.rows_of(x), weight, bias, initial_state)


library.operator(
    f"causal_conv1d_qkv({_INPUTS}, int[] heads, bool output_final_state) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    _gradients,
    _save,
)
library.operator(
    f"causal_conv1d_qkv_backward({_GRADS}, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
    library.no_gradient("causal_conv1d_qkv"),
    lambda ctx, inputs, output: None,
)


def call(*args):
    """Run directly where nothing watches, else through torch."""
    if library.is_plain(*args[:5]):
        return _forward(*args)
    return library.call("causal_conv1d_qkv", *args)
