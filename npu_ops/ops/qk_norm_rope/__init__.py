"""Fuses the steps before attention in Qwen3: split of the projection, norm of heads, rotation."""

from __future__ import annotations

import torch

from npu_ops.core import env
from npu_ops.core.registry import explains
from npu_ops.core.signature import call_of
from npu_ops.ops.qk_norm_rope import op, reference
from npu_ops.ops.qk_norm_rope.arguments import by_position, by_table
from npu_ops.ops.rms_norm import rms_norm
from npu_ops.ops.rope import apply_rotary_pos_emb

__all__ = ["qk_norm_rope", "qk_norm_rope_cached"]

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


def qk_norm_rope(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float = 1e-6,
    zero_centered: bool = False,
    gated: bool = False,
    mrope_section: list[int] | None = None,
    section_layout: str | None = None,
    pair_layout: str = "half",
    rotary_dim: int | None = None,
    copy_rest: bool = True,
) -> Outputs:
    """Split a fused projection, RMS-normalize each head of q and k, and rotate them, in one pass.

    It computes in fp32 (float64: in float64) and rounds once. A separate norm and rotation round
    twice, transformers four times. With `NPU_OPS_CONSISTENT` it rounds twice, as training does. The
    gradients of the weights are summed in fp32, in a fixed order.

    Args:
        qkv: `[B, S, W]` or packed `[T, W]`, float32, bfloat16, float16 or float64; a slice of a
            wider tensor is read without a copy. A row is N query heads, KV key heads, KV value
            heads; W = (N + 2 KV) D, or (2 N + 2 KV) D if gated.
        q_weight, k_weight: `[D]`, D the head dimension.
        cos, sin: `[B or 1, S, R]` or, packed, `[T, R]`, as in `apply_rotary_pos_emb`: R is the
            rotary dimension or half of it. With an mrope_section `[3, ..]`: one table each for T, H
            and W.
        num_heads, num_kv_heads: N and KV.
        eps: 0 or more.
        zero_centered: multiply by 1 + weight (Qwen3-Next, Qwen3.5) instead of weight.
        gated: each head's query is followed by its gate (Qwen3-Next, Qwen3.5).
        mrope_section, section_layout: as in `apply_multimodal_rotary_pos_emb`; None: one axis.
        pair_layout, rotary_dim: as in `apply_rotary_pos_emb`.
        copy_rest: False returns v and the gate as views of qkv, which is free if no gradient is
            needed. With a gradient, True is cheaper: one pass then computes qkv's whole gradient.

    Returns:
        q `[.., N, D]`, k and v `[.., KV, D]`, and the gate `[.., N, D]` or None, of qkv's dtype,
        contiguous unless they are views. Differentiable once in qkv, q_weight and k_weight.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: a shape, a device, the number of heads or eps is invalid, sections do not fit R
            / 2, or cos or sin require a gradient.
        NotImplementedError: the backward itself is differentiated.

    Source: transformers `Qwen3Attention`, `Qwen3VLTextAttention` and `Qwen3NextAttention`.
    """
    return _run(by_table, Call(
        qkv, q_weight, k_weight, cos, sin, num_heads, num_kv_heads, eps, zero_centered, gated,
        mrope_section, section_layout, pair_layout, rotary_dim, copy_rest,
    ))  # fmt: skip


def qk_norm_rope_cached(
    positions: torch.Tensor,
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float = 1e-6,
    zero_centered: bool = False,
    gated: bool = False,
    mrope_section: list[int] | None = None,
    section_layout: str | None = None,
    pair_layout: str = "half",
    rotary_dim: int | None = None,
    copy_rest: bool = True,
) -> Outputs:
    """Compute `qk_norm_rope` with angles from a cache, by position, for servers.

    Args:
        positions: `[T]` or `[B, S]`, int32 or int64, as qkv's tokens; with an mrope_section also
            `[3, ..]`, rows T, H, W.
        cos_sin_cache: `[max_position, R]`, cosines in the first R / 2 columns, sines in the rest.
        rotary_dim: R; None: the cache's width. If given, it must equal that width.
        Otherwise as `qk_norm_rope`.

    Returns:
        As `qk_norm_rope`.

    Raises:
        As `qk_norm_rope`; ValueError for a position outside the cache (on the CPU; on a device, the
        rotated elements of its token become NaN).

    Source: SGLang and vLLM, `Qwen3Attention`.
    """
    return _run(by_position, CachedCall(
        positions, qkv, q_weight, k_weight, cos_sin_cache, num_heads, num_kv_heads, eps,
        zero_centered, gated, mrope_section, section_layout, pair_layout, rotary_dim, copy_rest,
    ))  # fmt: skip


Call = call_of(qk_norm_rope)
CachedCall = call_of(qk_norm_rope_cached)


def _run(inputs_of, call) -> Outputs:
    inputs = inputs_of(call)
    q, k, v, gate = _apart(*inputs) if env.settings.consistent else op.forward(*inputs)
    if not call.copy_rest:
        sizes = call.num_heads, call.num_kv_heads, call.q_weight.shape[0], call.gated
        _, _, v, gate = reference.split(call.qkv, *sizes)
    return q, k, v, gate if call.gated else None


def _apart(
    qkv, q_weight, k_weight, cos, sin, positions, num_heads, num_kv_heads, eps, zero_centered,
    gated, mrope_section, section_layout, pair_layout, rotary_dim, copy_rest,
):  # fmt: skip
    """Compute the op by `rms_norm` and then rope, as in training: the norm's result is rounded."""
    q, k, v, gate = reference.split(qkv, num_heads, num_kv_heads, q_weight.shape[0], gated)
    tables = reference.by_token(cos, sin, positions, mrope_section, section_layout, pair_layout)
    q, k = (
        rms_norm(x, weight, eps, zero_centered=zero_centered)
        for x, weight in ((q, q_weight), (k, k_weight))
    )
    layout = "TND" if qkv.dim() == 2 else "BSND"
    tables = (table[0] if layout == "TND" else table for table in tables)
    q, k = apply_rotary_pos_emb(
        q, k, *tables, layout=layout, pair_layout=pair_layout, rotary_dim=rotary_dim
    )
    if not copy_rest:
        return q, k, None, None
    return q, k, v.contiguous(), None if gate is None else gate.contiguous()


explains("qk_norm_rope", op.forward, lambda *args, **named: by_table(Call(*args, **named)))
explains(
    "qk_norm_rope_cached",
    op.forward,
    lambda *args, **named: by_position(CachedCall(*args, **named)),
)
