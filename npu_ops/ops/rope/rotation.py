"""Shared by rope, mrope and qk_norm_rope: declares operators that rotate q and k.

They work in place or not, and have gradients. qk_norm_rope uses only `check_positions` and
`why_not_wide`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from npu_ops.core import check, indices, library
from npu_ops.core.operator import InPlace, Operator
from npu_ops.core.rows import in_one_piece, like_one_piece
from npu_ops.ops.rope.packing import NOBODY

# Largest rotary dimension that fits the kernels' table of axes (csrc/rope/rotary_tiling.h).
_ASCENDC_WIDEST = 256


class Rotation:
    """A differentiable operator that rotates q and k to `q_out` and `k_out`, of the same shapes.

    Its gradient is the same operator with the inverse rotation, because a rotation's inverse is its
    transpose.

    Args:
        name: name of the operator.
        tables: its arguments after q and k, tensors first; one of them is `bool inverse`.
        reference: as for `Operator`.
        aclnn_why_not: returns why the op's `aclnn.py` does not support a call, or None.
    """

    def __init__(self, name: str, *, tables: str, reference: Callable, aclnn_why_not: Callable):
        self.forward = Operator(
            name,
            f"Tensor q, Tensor k, {tables} -> q_out, k_out",
            new=lambda inputs: (like_one_piece(inputs.q), like_one_piece(inputs.k)),
            reference=reference,
            lay_out=dict.fromkeys(("q", "k", "cos", "sin"), in_one_piece),
            why_not=dict.fromkeys(("triton_ascend", "cpu"), _why_not)
            | {"ascendc": _why_not_ascendc, "aclnn": aclnn_why_not},
            aclnn="behind",
            ascendc=True,
            is_empty=lambda arguments: not (arguments.q.numel() or arguments.k.numel()),
            check_indices=check_positions,
        )
        self.in_place = InPlace(self.forward, over={"q_out": "q", "k_out": "k"})
        library.differentiable(name, self._gradients, self._save)

    def __call__(self, k: torch.Tensor | None, inplace: bool, *inputs):
        """Return the public function's results; `k` is the caller's, `inputs` the operator's."""
        if inplace:
            self.in_place(*inputs)
            return inputs[0], k
        q_out, k_out = self.forward(*inputs)
        return q_out, None if k is None else k_out

    def _save(self, ctx, inputs, output):
        """Save the tables for the backward, which does not need q and k."""
        _, _, *tables = inputs
        ctx.save_for_backward(*(x for x in tables if _is_tensor_or_none(x)))
        ctx.settings = [x for x in tables if not _is_tensor_or_none(x)]

    def _gradients(self, ctx, grad_q, grad_k):
        inputs = self.forward.Inputs(grad_q, grad_k, *ctx.saved_tensors, *ctx.settings)
        back = self.forward(*inputs._replace(inverse=not inputs.inverse))
        return *back, *[None] * (len(inputs) - len(back))


def _is_tensor_or_none(value) -> bool:
    return value is None or isinstance(value, torch.Tensor)


def check_positions(arguments) -> None:
    """Raise ValueError unless each of an operator's positions is a row of its tables."""
    rows, positions = arguments.cos.shape[-2], arguments.positions
    if positions is not None:
        positions = positions[positions != NOBODY]
    indices.check_within("positions", positions, 0, rows - 1)


def _why_not(arguments) -> str | None:
    """Return why the kernels do not support a call, or None.

    Only an in-place call can have a non-contiguous last dimension: other calls first copy q and k.
    """
    q, k, cos, sin, *_ = arguments
    if k.dtype != q.dtype:
        return f"q is {check.short(q.dtype)} and k is {check.short(k.dtype)}"
    if sin.dtype != cos.dtype:
        return f"cos is {check.short(cos.dtype)} and sin is {check.short(sin.dtype)}"
    if q.stride(-1) != 1 or k.stride(-1) != 1:
        return "the last dimension of q or k is not contiguous"
    return None


def why_not_wide(arguments) -> str | None:
    """Return why the AscendC kernels do not support a rotation, or None."""
    if arguments.rotary_dim > _ASCENDC_WIDEST:
        return f"{arguments.rotary_dim} rotated elements are more than {_ASCENDC_WIDEST}"
    return None


def _why_not_ascendc(arguments) -> str | None:
    return why_not_wide(arguments) or _why_not(arguments)
