"""Computes the gated RMSNorm that follows the delta rule in Gated Delta Net."""

from __future__ import annotations

import torch

from npu_ops.core import check
from npu_ops.core.registry import explains
from npu_ops.ops.rms_norm_gated import op

__all__ = ["rms_norm_gated"]


def rms_norm_gated(
    x: torch.Tensor,
    weight: torch.Tensor,
    z: torch.Tensor,
    eps: float = 1e-6,
    *,
    norm_before_gate: bool = True,
    activation: str = "silu",
    group_size: int | None = None,
) -> torch.Tensor:
    """Compute `rmsnorm(x) * weight * act(z)`, or `rmsnorm(x * act(z)) * weight`.

    rmsnorm(x) is `x / sqrt(mean(x^2) + eps)` over the last dimension. The result is computed in
    fp32 (float64: in float64) and rounded once. transformers rounds rmsnorm(x) to x's dtype before
    it multiplies by weight and, if weight is not fp32, again before it multiplies by the gate. The
    gradient of weight is summed in fp32, in a fixed order.

    Args:
        x: `[..., D]`, float32, bfloat16, float16 or float64; a slice of a projection is read
            without a copy.
        weight: `[D]`.
        z: x's shape. All dtypes may differ.
        eps: 0 or more.
        norm_before_gate: True selects the first formula, as in transformers, fla and Qwen3-Next.
        activation: "silu" or "sigmoid".
        group_size: normalize groups of this many elements of the last dimension separately; None:
            all together.

    Returns:
        `[..., D]` of x's dtype, contiguous. Differentiable once in x, weight and z.

    Raises:
        TypeError: x, weight or z is not a tensor or not of a floating dtype.
        ValueError: a shape, a device, eps or the activation is invalid, or D is not a multiple of
            group_size.
        NotImplementedError: the backward itself is differentiated.

    Source: transformers `Qwen3NextRMSNormGated`; flash-linear-attention
    `fla/modules/{fused_norm_gate,layernorm_gated}.py`; Zhang and Sennrich, "Root Mean Square Layer
    Normalization", 2019.
    """
    args = _prepare(
        x, weight, z, eps, norm_before_gate=norm_before_gate, activation=activation,
        group_size=group_size,
    )  # fmt: skip
    return op.forward(*args)


def _prepare(x, weight, z, eps=1e-6, *, norm_before_gate=True, activation="silu", group_size=None):
    """Check the public arguments; return the operator's inputs."""
    check.rows(x, weight)
    check.like_x("z", z, x)
    check.epsilon("eps", eps)
    check.one_of("activation", activation, ("silu", "sigmoid"))
    group_size = _resolve_group_size(group_size, x.shape[-1])
    if group_size < x.shape[-1]:
        weight = weight.reshape(-1, group_size)
    return x, weight, z, float(eps), bool(norm_before_gate), activation


def _resolve_group_size(group_size, width):
    if group_size is None:
        return width
    if not isinstance(group_size, int) or group_size < 1 or width % group_size:
        raise ValueError(f"group_size: got {group_size!r}, needs a divisor of {width}")
    return group_size


explains("rms_norm_gated", op.forward, _prepare)
