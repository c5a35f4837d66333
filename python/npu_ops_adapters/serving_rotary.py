"""Shared by sglang, vllm: rotary embedding, whose modules are alike in both."""

from __future__ import annotations

import npu_ops


def rotate(positions, query, key, cos_sin_cache, head_size, rotary_dim, is_neox_style):
    """Rotate query and key `[T, N * D]` or `[T, N, D]` by the angles of positions `[T]`.

    cos_sin_cache: `[rows, rotary_dim]`; a row has cosines, then sines.
    """
    tokens = query.shape[0]
    cos, sin = cos_sin_cache.chunk(2, dim=-1)
    q, k = npu_ops.apply_rotary_pos_emb(
        query.reshape(tokens, -1, head_size),
        key.reshape(tokens, -1, head_size),
        cos,
        sin,
        positions,
        layout="TND",
        pair_layout=pair_layout(is_neox_style),
        rotary_dim=rotary_dim,
    )
    return q.view(query.shape), k.view(key.shape)


def rotate_by_embedding(embedding, positions, query, key):
    """Rotate query and key with an embedding module's cache.

    positions: `[T]`, or `[3, T]` for an embedding with mrope sections. The module's
    mrope_interleaved is the section layout, its is_neox_style the pair layout.
    """
    if positions.dim() == 1:
        return rotate(
            positions, query, key, embedding.cos_sin_cache, embedding.head_size,
            embedding.rotary_dim, embedding.is_neox_style,
        )  # fmt: skip
    return npu_ops.apply_multimodal_rotary_pos_emb_cached(
        positions,
        query,
        key,
        embedding.cos_sin_cache,
        embedding.mrope_section,
        "interleaved" if embedding.mrope_interleaved else "chunked",
        pair_layout(embedding.is_neox_style),
        embedding.rotary_dim,
        head_dim=embedding.head_size,
    )


def norm_and_rotate(attention, positions, qkv, **options):
    """Split, normalize and rotate a layer's projection qkv `[T, W]`.

    Returns q, k and v, `[T, heads * D]`, and the gate `[T, N, D]` or None.
    """
    embedding, norm = attention.rotary_emb, attention.q_norm
    sections = {}
    if positions.dim() == 2 and getattr(embedding, "mrope_section", None):
        layout = "interleaved" if embedding.mrope_interleaved else "chunked"
        sections = {"mrope_section": list(embedding.mrope_section), "section_layout": layout}
    *heads, gate = npu_ops.qk_norm_rope_cached(
        positions,
        qkv,
        norm.weight,
        attention.k_norm.weight,
        embedding.cos_sin_cache,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        eps=norm.variance_epsilon,
        pair_layout=pair_layout(embedding.is_neox_style),
        rotary_dim=embedding.rotary_dim,
        **sections,
        **options,
    )
    return *(x.flatten(1) for x in heads), gate


def pair_layout(is_neox_style: bool) -> str:
    """Return the pair layout of GPT-NeoX or GPT-J."""
    return "half" if is_neox_style else "interleaved"
