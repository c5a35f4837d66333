"""The chunked gated delta rule as torch operators: schemas, fake kernels, autograd, tables."""

from __future__ import annotations

import torch

from npu_ops.core import library
from npu_ops.core.registry import Implementation, Table, from_module
from npu_ops.ops.chunk_gated_delta_rule import reference

CHUNK_SIZES = (16, 32, 64)
_TRITON_WIDEST = 256
_FOLDER = "npu_ops.ops.chunk_gated_delta_rule"
_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state, "
    "Tensor? cu_seqlens, float scale, int chunk_size, bool state_v_first, bool normalize"
)


def _triton_why_not(q, k, v, chunk_size) -> str | None:
    for name, size in (("K", q.shape[-1]), ("V", v.shape[-1])):
        if size > _TRITON_WIDEST:
            return f"{name} is {size}, above {_TRITON_WIDEST}"
    if chunk_size not in CHUNK_SIZES:
        return f"it has no kernel for chunks of {chunk_size}"
    return library.triton_why_not() or library.dtype_why_not(q)


def _cpu_why_not(q) -> str | None:
    return library.build_info()["why_not"] or library.dtype_why_not(q)


def _reference(*args):
    *inputs, _, state_v_first, normalize, o, final_state = args
    read, states = reference.chunk_gated_delta_rule(*inputs, state_v_first, normalize)
    o.copy_(read)
    if final_state is not None:
        final_state.copy_(states)


def _reference_backward(*args):
    *inputs, _, state_v_first, normalize = args[:13]
    found = reference.chunk_gated_delta_rule_backward(*inputs, state_v_first, normalize)
    for gradient, value in zip(args[13:], found, strict=True):
        if gradient is not None:
            gradient.copy_(value)


# Contiguous tensors; g, beta, the states and their gradients in fp32 (fp64 where q is), the rest
# in one dtype. There is at least one token; a sequence of none passes its state through.
forward_table = Table(
    "chunk_gated_delta_rule",
    [
        Implementation(
            "triton_ascend",
            from_module(f"{_FOLDER}.triton_ascend:chunk_gated_delta_rule"),
            frozenset({"npu", "cuda"}),
            lambda q, k, v, *rest: _triton_why_not(q, k, v, rest[5]),
        ),
        Implementation(
            "cpu",
            from_module(f"{_FOLDER}.cpu:chunk_gated_delta_rule"),
            frozenset({"cpu"}),
            lambda q, *rest: _cpu_why_not(q),
        ),
        Implementation("reference", lambda: _reference, frozenset(), lambda *args: None),
    ],
)

backward_table = Table(
    "chunk_gated_delta_rule_backward",
    [
        Implementation(
            "triton_ascend",
            from_module(f"{_FOLDER}.triton_ascend:chunk_gated_delta_rule_backward"),
            frozenset({"npu", "cuda"}),
            lambda do, dht, q, k, v, *rest: _triton_why_not(q, k, v, rest[5]),
        ),
        Implementation(
            "cpu",
            from_module(f"{_FOLDER}.cpu:chunk_gated_delta_rule_backward"),
            frozenset({"cpu"}),
            lambda do, dht, q, *rest: _cpu_why_not(q),
        ),
        Implementation("reference", lambda: _reference_backward, frozenset(), lambda *args: None),
    ],
)


def _contiguous(*tensors):
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def _states(q, v, g, cu_seqlens, state_v_first):
    """An uninitialised state of every sequence and value head."""
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    matrix = (v.shape[3], q.shape[3]) if state_v_first else (q.shape[3], v.shape[3])
    return g.new_empty((sequences, v.shape[2], *matrix))


def _pass_through(from_states, states):
    """States that no token changes."""
    if states is not None:
        states.zero_() if from_states is None else states.copy_(from_states)


def outputs(
    q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size, state_v_first, normalize, wanted
):
    """o, and the final states or something empty."""
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    return o, _states(q, v, g, cu_seqlens, state_v_first) if wanted else g.new_empty((0,))


def _forward(*args):
    *tensors, scale, chunk_size, state_v_first, normalize, wanted = args
    tensors = _contiguous(*tensors)
    settings = scale, chunk_size, state_v_first, normalize
    o, states = map(library.poisoned, outputs(*tensors, *settings, wanted))
    final_state = states if wanted else None
    if o.numel():
        forward_table.run(*tensors, *settings, o, final_state)
    else:
        _pass_through(tensors[5], final_state)
    return o, states


def _save(ctx, inputs, output):
    *tensors, ctx.scale, ctx.chunk_size, ctx.state_v_first, ctx.normalize, ctx.wanted = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx, do, dht):
    settings = ctx.scale, ctx.chunk_size, ctx.state_v_first, ctx.normalize
    *gradients, dh0 = library.call(
        "chunk_gated_delta_rule_backward",
        do,
        dht if ctx.wanted else None,
        *ctx.saved_tensors,
        *settings,
    )
    return *gradients, dh0 if ctx.needs_input_grad[5] else None, *(None,) * 6


def _backward_outputs(do, dht, q, k, v, g, beta, initial_state, *rest):
    """Uninitialised gradients; that of the states is empty where there are none."""
    dh0 = g.new_empty((0,)) if initial_state is None else initial_state
    return tuple(
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g, beta, dh0)
    )


def _backward(*args):
    *tensors, scale, chunk_size, state_v_first, normalize = args
    tensors = _contiguous(*tensors)
    *gradients, dh0 = outputs = tuple(map(library.poisoned, _backward_outputs(*tensors)))
    dh0 = None if tensors[7] is None else dh0
    if tensors[0].numel():
        settings = scale, chunk_size, state_v_first, normalize
        backward_table.run(*tensors, *settings, *gradients, dh0)
    else:
        _pass_through(tensors[1], dh0)
    return outputs


library.operator(
    f"chunk_gated_delta_rule({_INPUTS}, bool output_final_state) -> (Tensor, Tensor)",
    _forward,
    outputs,
    _gradients,
    _save,
)
library.operator(
    f"chunk_gated_delta_rule_backward(Tensor do, Tensor? dht, {_INPUTS}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_outputs,
    library.no_gradient("chunk_gated_delta_rule_backward"),
)


def call(*args):
    """Run directly where nothing watches, else through torch."""
    if library.is_plain(*args[:7]):
        return _forward(*args)
    return library.call("chunk_gated_delta_rule", *args)
