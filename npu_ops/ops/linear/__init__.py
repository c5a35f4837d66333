"""linear: a matrix product whose rows have the same bits for any number of rows."""

from __future__ import annotations

import torch

from npu_ops.core import check
from npu_ops.core.registry import explains
from npu_ops.ops.linear import op

__all__ = ["linear"]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `x weight^T + bias`; the bits of a row do not depend on the other rows.

    PyTorch's and the vendor's products choose the order of summation by the number of rows, so a
    decoded token gets other bits than in training. Here each element is one sum in a fixed order,
    in fp32, rounded once. With `NPU_OPS_CONSISTENT` PyTorch's own products by a matrix call this
    function (docs/invariance.md), except in gradients.

    Args:
        x: `[.., K]`, float32, bfloat16, float16 or float64.
        weight: `[N, K]`, x's dtype.
        bias: `[N]`, x's dtype, or None.

    Returns:
        `[.., N]`, x's dtype. Differentiable once; PyTorch's products compute the gradients.

    Raises:
        TypeError: an argument is not a tensor, or not of x's dtype.
        ValueError: a shape or a device is invalid.
        NotImplementedError: the backward itself is differentiated.

    Source: torch `nn.functional.linear`; Thinking Machines' `batch_invariant_ops`.
    """
    return op.forward(*_prepare(x, weight, bias))


def _prepare(x, weight, bias=None):
    """Check the public arguments; return the operator's inputs."""
    check.floating("x", x)
    if x.dim() == 0:
        raise check.shape("x", x, "at least one dimension")
    check.floating("weight", weight)
    check.same_dtype("weight", weight, "x", x)
    check.same_device("weight", weight, "x", x)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise check.shape("weight", weight, f"[N, {x.shape[-1]}], x's last dimension")
    if bias is not None:
        check.floating("bias", bias)
        check.same_dtype("bias", bias, "x", x)
        check.same_device("bias", bias, "x", x)
        if bias.shape != weight.shape[:1]:
            raise check.shape("bias", bias, f"[{weight.shape[0]}], weight's rows")
    return x, weight, bias


explains("linear", op.forward, _prepare)
