"""Reference of qk_norm_rope, in plain PyTorch: split, RMS norm of each head, rotation."""

from __future__ import annotations

import torch

from npu_ops.ops.mrope import reference as mrope
from npu_ops.ops.rms_norm_gated.reference import compute_dtype, reciprocal_rms
from npu_ops.ops.rope import reference as rope


def qk_norm_rope(
    qkv, q_weight, k_weight, cos, sin, positions, num_heads, num_kv_heads, eps, zero_centered,
    gated, mrope_section, section_layout, pair_layout, rotary_dim,
):  # fmt: skip
    """Return q and k normalized and rotated, and v and the gate unchanged.

    The gate is None if not gated.

    qkv: [B, S, W], see `split`. cos, sin: [A, Bc, rows, W]; A is 3 with an mrope_section, else 1.
    positions: None or [A, Bp, S] rows.

    q and k are computed in fp32 (fp64 if an input is) and rounded once.
    """
    q, k, v, gate = split(qkv, num_heads, num_kv_heads, q_weight.shape[0], gated)
    wide = compute_dtype(qkv, q_weight, k_weight)
    tables = by_token(cos, sin, positions, mrope_section, section_layout, pair_layout)

    def one(x, weight):
        x = x.to(wide)
        normed = x * reciprocal_rms(x, eps) * multiplier(weight, zero_centered, wide)
        rotated = rope.rotate(normed, *tables, "BSND", pair_layout, False, rotary_dim)
        return rotated.to(qkv.dtype)

    return one(q, q_weight), one(k, k_weight), v, gate


def qk_norm_rope_backward(
    grad_q, grad_k, grad_v, grad_gate, qkv, q_weight, k_weight, cos, sin, positions, num_heads,
    num_kv_heads, eps, zero_centered, gated, mrope_section, section_layout, pair_layout, rotary_dim,
):  # fmt: skip
    """Return the gradients of qkv and, in fp32 or fp64, of the weights.

    grad_v and grad_gate may be None.
    """
    grad_qkv = torch.zeros_like(qkv)
    settings = num_heads, num_kv_heads, q_weight.shape[0], gated
    q, k, _, _ = split(qkv, *settings)
    to_q, to_k, to_v, to_gate = split(grad_qkv, *settings)
    wide = compute_dtype(qkv, q_weight, k_weight)
    tables = by_token(cos, sin, positions, mrope_section, section_layout, pair_layout)

    def one(grad, x, weight, to):
        x, w = x.to(wide), multiplier(weight, zero_centered, wide)
        grad_y = rope.rotate(grad.to(wide), *tables, "BSND", pair_layout, True, rotary_dim)
        r = reciprocal_rms(x, eps)
        n, grad_n = x * r, grad_y * w
        to.copy_(r * (grad_n - n * (grad_n * n).mean(-1, keepdim=True)))
        return (grad_y * n).sum_to_size(weight.shape)

    grad_weights = one(grad_q, q, q_weight, to_q), one(grad_k, k, k_weight, to_k)
    for grad, to in ((grad_v, to_v), (grad_gate, to_gate)):
        if grad is not None:
            to.copy_(grad)
    return grad_qkv, *grad_weights


def split(qkv, num_heads, num_kv_heads, head_dim, gated):
    """Split a projection [..., W] into views: q [..., N, D], k and v [..., KV, D], and the gate.

    The gate is [..., N, D] or None. A token's row is its queries, its keys, its values. If gated,
    each head's query is followed by its gate.
    """
    queries = num_heads * (2 if gated else 1)
    heads = qkv.view(*qkv.shape[:-1], queries + 2 * num_kv_heads, head_dim)
    q, k, v = heads.split([queries, num_kv_heads, num_kv_heads], dim=-2)
    if not gated:
        return q, k, v, None
    return q[..., 0::2, :], k, v, q[..., 1::2, :]


def multiplier(weight, zero_centered, wide):
    """Return the factor of a normalized head: weight or 1 + weight."""
    return 1 + weight.to(wide) if zero_centered else weight.to(wide)


def by_token(cos, sin, positions, mrope_section, section_layout, pair_layout):
    """Return the tables' rows of each token, [B or 1, S, W]; with 3 axes, they are merged."""
    if mrope_section:
        axes = mrope.axis_of_frequency(mrope_section, section_layout, cos.device)
        return tuple(mrope.merge(table, positions, axes, pair_layout) for table in (cos, sin))
    rows = None if positions is None else positions[0]
    return tuple(rope.gather(table[0], rows) for table in (cos, sin))
