"""The recurrent gated delta rule as torch operators: schemas, fake kernels, autograd, tables."""

from __future__ import annotations

import torch

from npu_ops.core import library
from npu_ops.core.registry import Implementation, Table, from_module, from_native
from npu_ops.ops.fused_recurrent_gated_delta_rule import reference

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? gk, Tensor? gv, Tensor beta, "
    "Tensor? initial_state, Tensor? cu_seqlens, float scale, bool state_v_first"
)
_GRADIENTS = (
    "Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor(d!)? dg, Tensor(e!)? dgk, "
    "Tensor(f!)? dgv, Tensor(g!) dbeta, Tensor(h!)? dh0"
)
_TRITON = "npu_ops.ops.fused_recurrent_gated_delta_rule.triton_ascend"


def _triton_why_not(*args) -> str | None:
    return library.triton_why_not() or library.dtype_why_not(*args)


def _cpu_why_not(*args) -> str | None:
    return library.build_info()["why_not"] or library.dtype_why_not(*args)


def _reference(*args):
    *inputs, o, final_state = args
    read, states = reference.fused_recurrent_gated_delta_rule(*inputs)
    o.copy_(read)
    if final_state is not None:
        final_state.copy_(states)


def _reference_backward(*args):
    inputs, gradients = args[:13], args[13:]
    found = reference.fused_recurrent_gated_delta_rule_backward(*inputs)
    for gradient, value in zip(gradients, found, strict=True):
        if gradient is not None:
            gradient.copy_(value)


forward_table = Table(
    "fused_recurrent_gated_delta_rule",
    [
        Implementation(
            "triton_ascend",
            from_module(f"{_TRITON}:fused_recurrent_gated_delta_rule"),
            frozenset({"npu", "cuda"}),
            _triton_why_not,
        ),
        Implementation(
            "cpu",
            from_native(
                f"fused_recurrent_gated_delta_rule_cpu({_INPUTS}, "
                "Tensor(a!) o, Tensor(b!)? final_state) -> ()"
            ),
            frozenset({"cpu"}),
            _cpu_why_not,
        ),
        Implementation("reference", lambda: _reference, frozenset(), lambda *args: None),
    ],
)

backward_table = Table(
    "fused_recurrent_gated_delta_rule_backward",
    [
        Implementation(
            "triton_ascend",
            from_module(f"{_TRITON}:fused_recurrent_gated_delta_rule_backward"),
            frozenset({"npu", "cuda"}),
            _triton_why_not,
        ),
        Implementation(
            "cpu",
            from_native(
                "fused_recurrent_gated_delta_rule_backward_cpu(Tensor do, Tensor? dht, "
                f"{_INPUTS}, {_GRADIENTS}) -> ()"
            ),
            frozenset({"cpu"}),
            _cpu_why_not,
        ),
        Implementation("reference", lambda: _reference_backward, frozenset(), lambda *args: None),
    ],
)


def _contiguous(*tensors):
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def _states(q, v, cu_seqlens, state_v_first, wide):
    """An uninitialised state of every sequence and value head."""
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    matrix = (v.shape[3], q.shape[3]) if state_v_first else (q.shape[3], v.shape[3])
    return v.new_empty((sequences, v.shape[2], *matrix), dtype=wide)


def _outputs(q, k, v, g, gk, gv, beta, initial_state, cu_seqlens, scale, state_v_first, wanted):
    """o, and the final states or something empty."""
    wide = reference.compute_dtype(q, k, v, g, gk, gv, beta, initial_state)
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    states = _states(q, v, cu_seqlens, state_v_first, wide)
    return o, states if wanted else v.new_empty((0,), dtype=wide)


def _forward(*args):
    *tensors, scale, state_v_first, wanted = args
    tensors = _contiguous(*tensors)
    o, states = map(library.poisoned, _outputs(*tensors, scale, state_v_first, wanted))
    if o.shape[0]:
        forward_table.run(*tensors, scale, state_v_first, o, states if wanted else None)
    return o, states


def _save(ctx, inputs, output):
    *tensors, ctx.scale, ctx.state_v_first, ctx.wanted = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx, do, dht):
    gradients = library.call(
        "fused_recurrent_gated_delta_rule_backward",
        do,
        dht if ctx.wanted else None,
        *ctx.saved_tensors,
        ctx.scale,
        ctx.state_v_first,
    )
    wanted = zip(ctx.needs_input_grad, gradients, strict=False)
    return *(grad if needed else None for needed, grad in wanted), None, None, None, None


def _backward_outputs(do, dht, *args):
    """Uninitialised gradients of the eight tensors, in their dtypes; empty for those not there."""
    absent = do.new_empty((0,))
    return tuple(
        absent.clone() if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in args[:8]
    )


def _backward(*args):
    *tensors, scale, state_v_first = args
    tensors = _contiguous(*tensors)
    inputs = tensors[2:10]
    wide = reference.compute_dtype(*tensors)
    gradients = [None if x is None else library.new_output(x, wide) for x in inputs]
    if tensors[0].shape[0]:
        backward_table.run(*tensors, scale, state_v_first, *gradients)
    return tuple(
        tensors[0].new_empty((0,)) if grad is None else grad.to(x.dtype)
        for x, grad in zip(inputs, gradients, strict=True)
    )


library.operator(
    f"fused_recurrent_gated_delta_rule({_INPUTS}, bool output_final_state) -> (Tensor, Tensor)",
    _forward,
    _outputs,
    _gradients,
    _save,
)
library.operator(
    f"fused_recurrent_gated_delta_rule_backward(Tensor do, Tensor? dht, {_INPUTS}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_outputs,
    library.no_gradient("fused_recurrent_gated_delta_rule_backward"),
)


def call(*args):
    """Run directly where nothing watches, else through torch."""
    if library.is_plain(*args[:9]):
        return _forward(*args)
    return library.call("fused_recurrent_gated_delta_rule", *args)
