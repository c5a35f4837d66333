"""SwiGLU: the gated activation between the projections of a model's MLP."""

from __future__ import annotations

import torch

from npu_ops.core import check
from npu_ops.core.registry import explains
from npu_ops.ops.swiglu import op

__all__ = ["swiglu"]


def swiglu(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """`silu(gate) * up`, elementwise; silu(z) is `z / (1 + exp(-z))`.

    Computed in fp32 and rounded once. transformers and Megatron round silu(gate) to the dtype
    before they multiply, so their result may be one rounding away. Backward computes silu(gate)
    again: gate and up alone are kept for it.

    Args:
        gate: `[..., d]`; or, without up, `[..., 2 d]`: the gate and up behind it, as one projection
            gives them. float32, bfloat16, float16 or float64. Slices of a projection are read in
            place.
        up: gate's shape and dtype, or None.

    Returns:
        `[..., d]` of gate's dtype, contiguous. Differentiable once in gate and up.

    Raises:
        TypeError: gate or up is not a tensor or not of a floating dtype; or their dtypes differ.
        ValueError: a shape or a device.
        NotImplementedError: in backward of backward.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020; torch_npu's `npu_swiglu` and
    SGLang's `SiluAndMul` (without up); transformers' `Qwen3MLP` (with up).
    """
    return op.forward(*_prepare(gate, up))


def _prepare(gate, up=None):
    """Check the arguments; return them as the operator takes them."""
    check.floating("gate", gate)
    if gate.dim() == 0:
        raise check.shape("gate", gate, "at least one dimension")
    if up is None:
        if gate.shape[-1] % 2:
            raise check.shape("gate", gate, "an even last dimension: no up is given")
        return gate, None
    check.floating("up", up)
    if up.shape != gate.shape:
        raise check.shape("up", up, f"gate's shape {list(gate.shape)}")
    check.same_dtype("up", up, "gate", gate)
    check.same_device("up", up, "gate", gate)
    return gate, up


explains("swiglu", op.forward, _prepare)
