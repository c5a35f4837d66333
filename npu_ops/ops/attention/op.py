"""attention as torch operators: schemas, fake kernels, autograd, implementations."""

from __future__ import annotations

import torch

from npu_ops.core import library
from npu_ops.core.registry import Implementation, Table, from_module
from npu_ops.ops.attention import reference
from npu_ops.ops.attention.arguments import Extra, Rule, normal, shape_in_layout
from npu_ops.ops.attention.limits import triton_why_not
from npu_ops.ops.attention.routing import plan_of

_FOLDER = "npu_ops.ops.attention"
_TENSORS = 3 + len(Extra._fields)
_INPUTS = (
    "Tensor q, Tensor k, Tensor v, "
    + ", ".join(f"Tensor? {name}" for name in Extra._fields)
    + ", str layout, SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, SymInt window_left, "
    "SymInt window_right, bool bottom_right, float softcap, float dropout_p, bool deterministic, "
    "bool training"
)


def _reference(q, k, v, extra, rule, out, lse):
    found, log_sum = reference.attention(q, k, v, extra, rule)
    out.copy_(found)
    lse.copy_(log_sum)


def _reference_backward(dout, dlse, q, k, v, extra, rule, out, lse, *gradients):
    found = reference.attention_backward(dout, dlse, q, k, v, extra, rule, out, lse)
    for gradient, value in zip(gradients, found, strict=True):
        if gradient is not None:
            gradient.copy_(value)


# Tensors in the form of `arguments`; out and lse, or the gradients, are written. lse and the
# gradients of the bias and of the sinks are fp32 (fp64 where q is) and contiguous, the latter None
# where nobody wants them. There is a query, and memory for a key.
forward_table = Table(
    "attention",
    [
        Implementation(
            "aclnn",
            from_module(f"{_FOLDER}.aclnn:attention"),
            frozenset({"npu"}),
            lambda q, k, v, extra, rule, *rest: plan_of(q, k, v, extra, rule, "npu").why_not(
                "aclnn"
            ),
        ),
        Implementation(
            "triton_ascend",
            from_module(f"{_FOLDER}.triton_ascend:attention"),
            frozenset({"npu", "cuda"}),
            lambda q, k, v, extra, rule, *rest: triton_why_not(q, k, v, extra, rule),
        ),
        Implementation(
            "cpu",
            from_module(f"{_FOLDER}.cpu:attention"),
            frozenset({"cpu"}),
            lambda q, *rest: library.dtype_why_not(q),
        ),
        Implementation("reference", lambda: _reference, frozenset(), lambda *args: None),
    ],
)

backward_table = Table(
    "attention_backward",
    [
        Implementation(
            "aclnn",
            from_module(f"{_FOLDER}.aclnn:attention_backward"),
            frozenset({"npu"}),
            lambda dout, dlse, q, k, v, extra, rule, *rest: plan_of(
                q, k, v, extra, rule, "npu", dlse is not None
            ).why_not("aclnn"),
        ),
        Implementation(
            "triton_ascend",
            from_module(f"{_FOLDER}.triton_ascend:attention_backward"),
            frozenset({"npu", "cuda"}),
            lambda dout, dlse, q, k, v, extra, rule, *rest: triton_why_not(q, k, v, extra, rule),
        ),
        Implementation(
            "cpu",
            from_module(f"{_FOLDER}.cpu:attention_backward"),
            frozenset({"cpu"}),
            lambda dout, dlse, q, *rest: library.dtype_why_not(q),
        ),
        Implementation("reference", lambda: _reference_backward, frozenset(), lambda *args: None),
    ],
)


def _rows(x):
    """x with its last dimension contiguous, as the kernels read it."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def _split(args) -> tuple[list[torch.Tensor], Extra, Rule]:
    """The operator's flat arguments: q, k and v, the other tensors, the numbers."""
    return [_rows(x) for x in args[:3]], Extra(*args[3:_TENSORS]), Rule(*args[_TENSORS:])


def outputs(q, k, v, *rest):
    """Uninitialised out and lse."""
    layout = rest[_TENSORS - 3]
    out = q.new_empty(shape_in_layout((*q.shape[:3], v.shape[3]), layout))
    return normal(out, layout), q.new_empty(q.shape[:3], dtype=reference.compute_dtype(q))


def _has_keys(k, extra: Extra) -> bool:
    return k.numel() > 0 and (extra.block_table is None or extra.block_table.numel() > 0)


def _forward(*args):
    (q, k, v), extra, rule = _split(args)
    out, lse = map(library.poisoned, outputs(q, k, v, *args[3:]))
    if not _has_keys(k, extra):
        out.zero_()
        lse.copy_(lse.new_full((), -torch.inf) if extra.sinks is None else extra.sinks[:, None])
    elif out.numel():
        forward_table.run(q, k, v, extra, rule, out, lse)
    return out, lse


def _save(ctx, inputs, output):
    ctx.set_materialize_grads(False)  # None tells that nobody wants the gradient of lse
    ctx.numbers = inputs[_TENSORS:]
    ctx.save_for_backward(*output, *inputs[:_TENSORS])


def _gradients(ctx, dout, dlse):
    out, lse, *inputs = ctx.saved_tensors
    extra = Extra(*inputs[3:])
    if extra.block_table is not None:
        raise NotImplementedError("attention: got a gradient with a block_table, which has none")
    dout = torch.zeros_like(out) if dout is None else dout
    wanted = ctx.needs_input_grad[3], ctx.needs_input_grad[5]
    *found, dbias, dsinks = library.call(
        "attention_backward", dout, dlse, out, lse, *wanted, *inputs, *ctx.numbers
    )
    dbias = dbias.to(extra.bias.dtype) if wanted[0] else None
    rest = [None] * (_TENSORS - 6 + len(ctx.numbers))
    return *found, dbias, None, dsinks if wanted[1] else None, *rest


def _backward_outputs(dout, dlse, out, lse, bias_wanted, sinks_wanted, q, k, v, *rest):
    """Uninitialised gradients; those of the bias and the sinks are empty where not wanted."""
    extra = Extra(*rest[: _TENSORS - 3])
    bias = extra.bias.shape if bias_wanted else (0,)
    sinks = extra.sinks.shape if sinks_wanted else (0,)
    same = [torch.empty_like(x) for x in (q, k, v)]
    return *same, lse.new_empty(bias), lse.new_empty(sinks)


def _backward(dout, dlse, out, lse, bias_wanted, sinks_wanted, *args):
    (q, k, v), extra, rule = _split(args)
    wanted = bias_wanted, sinks_wanted
    found = _backward_outputs(dout, dlse, out, lse, *wanted, *args)
    if not (out.numel() and _has_keys(k, extra)):
        for gradient in found:
            gradient.zero_()
        if sinks_wanted and dlse is not None:  # lse is the sink
            found[-1].copy_(dlse.sum((0, 2)))
        return found
    *gradients, dbias, dsinks = found = tuple(map(library.poisoned, found))
    gradients += [dbias if bias_wanted else None, dsinks if sinks_wanted else None]
    dlse = dlse if dlse is None else dlse.contiguous()
    backward_table.run(_rows(dout), dlse, q, k, v, extra, rule, out, lse, *gradients)
    return found


library.operator(f"attention({_INPUTS}) -> (Tensor, Tensor)", _forward, outputs, _gradients, _save)
library.operator(
    "attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, bool bias_wanted, "
    f"bool sinks_wanted, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_outputs,
    library.no_gradient("attention_backward"),
)


def call(q, k, v, extra: Extra, rule: Rule):
    """Run directly where nothing watches, else through torch."""
    if library.is_plain(q, k, v, *extra):
        return _forward(q, k, v, *extra, *rule)
    return library.call("attention", q, k, v, *extra, *rule)
