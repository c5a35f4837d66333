"""grouped_linear: multiply each group of rows by its own matrix, as in a mixture of experts."""

from __future__ import annotations

import torch

from npu_ops.core import check
from npu_ops.core.registry import explains
from npu_ops.ops.grouped_linear import op

__all__ = ["grouped_linear"]


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Multiply rows `offs[g - 1]` to `offs[g]` of x by `weight[g]^T`: all experts in one call.

    With every kernel except the vendor's, a row has the same bits as in `linear`.
    `NPU_OPS_CONSISTENT` disables the vendor's kernel in the forward.

    Args:
        x: `[T, K]`, float32, bfloat16, float16 or float64; the rows of a group are adjacent.
        weight: `[G, N, K]`, x's dtype.
        offs: int32 or int64 `[G]`, the end of each group, as in torch's `grouped_mm`: never
            decreasing, at most T.

    Returns:
        `[T, N]`, x's dtype. Rows after the last group are 0. Invalid offs on a device give NaN,
        also in gradients. Differentiable once.

    Raises:
        TypeError: x or weight is not a tensor or not of x's dtype; offs is not an integer tensor.
        ValueError: a shape or a device is invalid; offs in host memory decrease or exceed T.
        NotImplementedError: the backward itself is differentiated.

    Source: torch `nn.functional.grouped_mm`; torch_npu `npu_grouped_matmul`.
    """
    return op.forward(*_prepare(x, weight, offs))


def _prepare(x, weight, offs):
    """Check the public arguments; return the operator's inputs."""
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
