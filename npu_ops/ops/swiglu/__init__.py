"""SwiGLU: the gated activation between the projections of a model's MLP."""

from __future__ import annotations

import torch

from npu_ops.core import check
from npu_ops.core.registry import explains
from npu_ops.ops.swiglu import op

__all__ = ["swiglu"]


def swiglu(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `silu(gate) * up`, elementwise; silu(z) is `z / (1 + exp(-z))`.

    It computes in fp32 (float64: in float64) and rounds once. transformers and Megatron round
    silu(gate) to the dtype before they multiply, so results may differ by one rounding. Only gate
    and up are saved for the backward, which computes silu(gate) again.

    Args:
        gate: `[..., d]`, float32, bfloat16, float16 or float64; a slice of a projection is read
            without a copy. If up is None: `[..., 2 d]`, the gate followed by up, as one projection
            returns them.
        up: gate's shape and dtype, or None.

    Returns:
        `[..., d]` of gate's dtype, contiguous. Differentiable once in gate and up.

    Raises:
        TypeError: gate or up is not a tensor or not of a floating dtype; or their dtypes differ.
        ValueError: a shape or a device is invalid.
        NotImplementedError: the backward itself is differentiated.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020; torch_npu's `npu_swiglu` and
    SGLang's `SiluAndMul` (without up); transformers' `Qwen3MLP` (with up).
    """
    return op.forward(*_prepare(gate, up))


def _prepare(gate, up=None):
    """Check the public arguments; return the operator's inputs."""
    check.floating("gate", gate)
    if gate.dim() == 0:
        raise check.shape("gate", gate, "at least one dimension")
    if up is None:
        if gate.shape[-1] % 2:
            raise check.shape("gate", gate, "an even last dimension, because up is None")
        return gate, None
    check.floating("up", up)
    if up.shape != gate.shape:
        raise check.shape("up", up, f"gate's shape {list(gate.shape)}")
    check.same_dtype("up", up, "gate", gate)
    check.same_device("up", up, "gate", gate)
    return gate, up


explains("swiglu", op.forward, _prepare)
