"""l2norm: normalizes queries and keys, as in Gated Delta Net."""

from __future__ import annotations

import torch

from npu_ops.core import check
from npu_ops.core.registry import explains
from npu_ops.ops.l2norm import op

__all__ = ["l2norm"]


def l2norm(
    x: torch.Tensor,
    eps: float = 1e-6,
    output_dtype: torch.dtype | None = None,
    *,
    dim: int = -1,
) -> torch.Tensor:
    """Compute `x / sqrt(sum(x^2) + eps)` over the last dimension, in fp32, rounded once.

    eps is under the root, unlike in `torch.nn.functional.normalize`. This function accepts calls
    written for the l2norm of flash-linear-attention or Hugging Face. Hugging Face's computes in x's
    dtype: in bfloat16 it also rounds x^2, the sum and the root.

    Args:
        x: `[..., D]`, float32, bfloat16, float16 or float64; a slice of a fused projection is read
            without a copy.
        eps: 0 or more.
        output_dtype: dtype of the result; None: x's.
        dim: Hugging Face's argument; must be the last dimension.

    Returns:
        `[..., D]` of `output_dtype`, contiguous. Differentiable once in x; only x is saved for the
        backward.

    Raises:
        TypeError: x is not a tensor or not of a floating dtype; output_dtype is not a floating one.
        ValueError: x is a scalar, dim is not its last dimension, or eps is negative or not finite.
        NotImplementedError: the backward itself is differentiated.

    Source: flash-linear-attention `fla/modules/l2norm.py`; transformers `modeling_qwen3_next.py`.
    """
    return op.forward(*_prepare(x, eps, output_dtype, dim=dim))


def _prepare(x, eps=1e-6, output_dtype=None, *, dim=-1):
    """Check the public arguments; return the operator's inputs."""
    check.floating("x", x)
    if x.dim() == 0:
        raise check.shape("x", x, "at least one dimension")
    check.one_of("dim", dim, (-1, x.dim() - 1))
    check.epsilon("eps", eps)
    dtype = x.dtype if output_dtype is None else output_dtype
    check.float_dtype("output_dtype", dtype)
    return x, float(eps), dtype


explains("l2norm", op.forward, _prepare)
