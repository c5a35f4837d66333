"""Fuses the convolution, SiLU, split and l2norm that precede Gated Delta Net's delta rule."""

from __future__ import annotations

import torch

from npu_ops.core import check
from npu_ops.core.registry import explains
from npu_ops.ops.causal_conv1d import arguments, layout
from npu_ops.ops.causal_conv1d_qkv import op

__all__ = ["causal_conv1d_qkv"]

MAX_DIM = 256


def causal_conv1d_qkv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = "silu",
    cu_seqlens: torch.Tensor | None = None,
    eps: float = 1e-6,
    use_qk_l2norm: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Apply `causal_conv1d` to q, k and v side by side, split them, and apply `l2norm` to q, k.

    It computes in fp32 (float64: in float64) and rounds once; the separate ops round q and k twice.
    It reads x once and stores no intermediate result. Gradients are deterministic.

    Args:
        x: `[B, T, D]` with D = 2 HK K + HV V, float32, bfloat16, float16 or float64. A strided view
            with contiguous channels (a slice of a fused projection) is read without a copy.
        weight: `[D, W]` with W 2 to 8, of x's dtype or float32; the last column multiplies the
            current token.
        bias: `[D]`, of x's dtype or float32; or None.
        num_k_heads, num_v_heads, head_k_dim, head_v_dim: HK, HV, K and V. K and V are at most 256;
            on an NPU, a K that is a power of two is fastest.
        initial_state: `[N, D, W]` of x's dtype, as in `causal_conv1d`. None: zeros.
        output_final_state: return the last W tokens of each sequence, as `causal_conv1d` does.
        activation: "silu", "swish" (the same) or None.
        cu_seqlens: `[N + 1]` int32 or int64: the starts of packed sequences, then the end of the
            last; needs B = 1. Sequences may be empty. None: B sequences of T. Tokens behind the
            last sequence get 0, in results and in gradients.
        eps: 0 or more; added under the square root, as in `l2norm`.
        use_qk_l2norm: False skips the norm of q and k.

    Returns:
        q and k `[B, T, HK, K]`, v `[B, T, HV, V]`, contiguous, of x's dtype, and the final state
        `[N, D, W]` or None. Differentiable once in x, weight, bias and initial_state.

    Raises:
        TypeError: a dtype is not supported, or heads and dims are not integers.
        ValueError: a shape, a device, an activation or eps is invalid. Or cu_seqlens on the CPU
            decrease, do not begin with 0 or end behind x. On a device, q, k, v, the final state,
            and the gradients of x and of the initial state are NaN instead.

    Source: the layers of transformers `modeling_qwen3_next.py`, one after another.
    """
    *outputs, final_state = op.forward(*_prepare(
        x, weight, bias, num_k_heads=num_k_heads, num_v_heads=num_v_heads, head_k_dim=head_k_dim,
        head_v_dim=head_v_dim, initial_state=initial_state, output_final_state=output_final_state,
        activation=activation, cu_seqlens=cu_seqlens, eps=eps, use_qk_l2norm=use_qk_l2norm,
    ))  # fmt: skip
    return *outputs, final_state if output_final_state else None


def _prepare(
    x, weight, bias=None, *, num_k_heads, num_v_heads, head_k_dim, head_v_dim, initial_state=None,
    output_final_state=False, activation="silu", cu_seqlens=None, eps=1e-6, use_qk_l2norm=True,
):  # fmt: skip
    """Check the public arguments; return the operator's inputs."""
    heads = [num_k_heads, num_v_heads, head_k_dim, head_v_dim]
    _check(x, weight, bias, initial_state, activation, cu_seqlens, eps, *heads)
    eps = float(eps) if use_qk_l2norm else None
    silu = activation is not None
    return (
        x, weight, bias, initial_state, cu_seqlens, silu, eps, heads, bool(output_final_state),
    )  # fmt: skip


def _check(
    x, weight, bias, initial_state, activation, cu_seqlens, eps, num_k_heads, num_v_heads,
    head_k_dim, head_v_dim,
) -> None:  # fmt: skip
    _check_count("num_k_heads", num_k_heads)
    _check_count("num_v_heads", num_v_heads)
    _check_count("head_k_dim", head_k_dim, MAX_DIM)
    _check_count("head_v_dim", head_v_dim, MAX_DIM)
    arguments.check_rows(x, weight, bias, activation, cu_seqlens)
    channels = 2 * num_k_heads * head_k_dim + num_v_heads * head_v_dim
    if x.shape[2] != channels:
        raise check.shape("x", x, f"[B, T, 2 HK K + HV V], here [B, T, {channels}]")
    shape = torch.Size((layout.sequences(x, cu_seqlens), *weight.shape))
    arguments.check_like_x("initial_state", initial_state, x, shape, "[N, D, W], here")
    check.epsilon("eps", eps)


def _check_count(name: str, value, most: int | None = None) -> None:
    """Raise unless `value` is an integer from 1 to `most`."""
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        raise TypeError(f"{name}: got {type(value).__name__}, needs an int")
    if value < 1 or (most is not None and value > most):
        raise ValueError(
            f"{name}: got {value}, needs {'1 or more' if most is None else f'1 to {most}'}"
        )


explains("causal_conv1d_qkv", op.forward, _prepare)
