"""Declaration of attention: its arguments, outputs and implementations."""

from __future__ import annotations

import torch

from npu_ops.core.library import dense_like
from npu_ops.core.operator import Backward, Operator
from npu_ops.core.rows import in_one_piece
from npu_ops.ops.attention import cpu, reference
from npu_ops.ops.attention.arguments import Extra, Rule, normal, shape_in_layout
from npu_ops.ops.attention.limits import triton_why_not
from npu_ops.ops.attention.routing import plan_of

# Tensors are in normal form (arguments.py). lse and the gradients of bias and sinks are fp32 (fp64
# if q is).
_INPUTS = (
    "Tensor q, Tensor k, Tensor v, "
    + ", ".join(f"Tensor? {name}" for name in Extra._fields)
    + ", str layout, SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, SymInt window_left, "
    "SymInt window_right, bool bottom_right, float softcap, float dropout_p, bool deterministic, "
    "bool training"
)


def _aclnn_why_not(arguments) -> str | None:
    q, k, v, extra, rule = arguments[:5]
    return plan_of(q, k, v, extra, rule, "npu").why_not("aclnn")


def _aclnn_backward_why_not(x) -> str | None:
    plan = plan_of(x.q, x.k, x.v, x.extra, x.rule, "npu", x.grad_lse is not None)
    return plan.why_not("aclnn")


def _outputs(x):
    out = x.q.new_empty(shape_in_layout((*x.q.shape[:3], x.v.shape[3]), x.layout))
    lse = x.q.new_empty(x.q.shape[:3], dtype=reference.compute_dtype(x.q))
    return normal(out, x.layout), lse


def _gradients(x):
    if x.block_table is not None:
        raise NotImplementedError(
            "attention: got a backward call with a block_table, needs one without"
        )
    wide = x.lse.dtype
    return (
        *(torch.empty_like(tensor) for tensor in (x.q, x.k, x.v)),
        dense_like(x.bias, wide) if x.needs_bias else None,
        dense_like(x.sinks, wide) if x.needs_sinks else None,
    )


def _nothing_to_read(x) -> bool:
    """Return whether there are no queries, or no keys in memory."""
    table = x.extra.block_table
    return not (x.q.numel() and x.k.numel() and (table is None or table.numel()))


def _check_indices(x) -> None:
    for _ in cpu.pieces(x.q, x.k, x.extra):
        pass


def _read_nothing(x) -> None:
    x.out.zero_()
    none = x.lse.new_full((), -torch.inf)
    x.lse.copy_(none if x.extra.sinks is None else x.extra.sinks[:, None])


def _gradients_of_nothing(x) -> None:
    for gradient in (x.grad_q, x.grad_k, x.grad_v, x.grad_bias):
        if gradient is not None:
            gradient.zero_()
    if x.grad_sinks is not None:  # without keys, lse equals the sink
        x.grad_sinks.copy_(0 if x.grad_lse is None else x.grad_lse.sum((0, 2)))


forward = Operator(
    "attention",
    f"{_INPUTS} -> out, lse",
    new=_outputs,
    reference=reference.attention,
    lay_out=dict.fromkeys(("q", "k", "v"), in_one_piece),
    why_not={"aclnn": _aclnn_why_not, "triton_ascend": triton_why_not},
    empty=_read_nothing,
    groups={"extra": Extra, "rule": Rule},
    is_empty=_nothing_to_read,
    check_indices=_check_indices,
    aclnn="first",
    cpu_in_python=True,
)
backward = Backward(
    forward,
    f"Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, {_INPUTS} "
    "-> grad_q, grad_k, grad_v, grad_bias?, grad_sinks?",
    shapes="bool needs_bias, bool needs_sinks",
    new=_gradients,
    reference=reference.attention_backward,
    lay_out=dict.fromkeys(("grad_out", "q", "k", "v"), in_one_piece)
    | {"grad_lse": torch.Tensor.contiguous},
    why_not={"aclnn": _aclnn_backward_why_not, "triton_ascend": triton_why_not},
    empty=_gradients_of_nothing,
    aclnn="first",
)
