"""grouped_linear: each group of rows by a matrix of its own, as experts are."""

from __future__ import annotations

import torch

from npu_ops.core import check
from npu_ops.core.registry import explains
from npu_ops.ops.grouped_linear import op

__all__ = ["grouped_linear"]


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Rows `offs[g - 1]` to `offs[g]` of x by `weight[g]^T`: a mixture's experts in one call.

    By kernels other than the vendor's a row has the bits that `linear` gives it. With
    `NPU_OPS_CONSISTENT` the vendor's are not used.

    Args:
        x: `[T, K]`, float32, bfloat16, float16 or float64; rows of one group lie together.
        weight: `[G, N, K]`, x's dtype.
        offs: int32 or int64 `[G]`, where each group ends, as torch's `grouped_mm` has it: never
            decreasing, T at most.

    Returns:
        `[T, N]`, x's dtype. Rows behind the last group are 0. Wrong offs on a device give NaN, in
        gradients too. Differentiable, once.

    Raises:
        TypeError: not a tensor, not of x's dtype, or offs that are no integers.
        ValueError: a shape or a device; offs in host memory that decrease or are beyond T.
        NotImplementedError: in backward of backward.

    Source: torch `nn.functional.grouped_mm`; torch_npu `npu_grouped_matmul`.
    """
    return op.forward(*_prepare(x, weight, offs))


def _prepare(x, weight, offs):
    """Check the public arguments; return them as the operator takes them."""
    check.floating("x", x)
    if x.dim() != 2:
        raise check.shape("x", x, "[T, K]")
    check.floating("weight", weight)
    check.same_dtype("weight", weight, "x", x)
    check.same_device("weight", weight, "x", x)
    if weight.dim() != 3 or weight.shape[2] != x.shape[1]:
        raise check.shape("weight", weight, f"[G, N, {x.shape[1]}], x's last dimension")
    check.indices("offs", offs)
    check.same_device("offs", offs, "x", x)
    if offs.shape != weight.shape[:1]:
        raise check.shape("offs", offs, f"[{weight.shape[0]}], one for each matrix of weight")
    return x, weight, offs


explains("grouped_linear", op.forward, _prepare)
