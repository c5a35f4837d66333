"""Multimodal rotary embedding: rotates q and k by angles of a token's time, height and width."""

from __future__ import annotations

import torch

from npu_ops.core import check
from npu_ops.core.registry import explains
from npu_ops.ops.mrope import op
from npu_ops.ops.mrope.sections import resolve_section
from npu_ops.ops.rope import arguments

__all__ = ["apply_multimodal_rotary_pos_emb", "apply_multimodal_rotary_pos_emb_cached"]


def apply_multimodal_rotary_pos_emb(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    mrope_section: list[int],
    unsqueeze_dim: int = 1,
    *,
    section_layout: str,
    layout: str | None = None,
    pair_layout: str = "half",
    rotary_dim: int | None = None,
    inverse: bool = False,
    inplace: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate q and k by angles of three axes, in one launch.

    This function accepts calls written for Hugging Face's Qwen2-VL. `section_layout` says which
    axis owns a frequency. `pair_layout` says which elements rotate together. The two settings are
    independent. If the tables of the three axes are equal, the result equals `apply_rotary_pos_emb`
    exactly.

    Args:
        q, k, unsqueeze_dim, layout, pair_layout, rotary_dim, inverse, inplace: as in
            `apply_rotary_pos_emb`.
        cos, sin: `[3, B, S, W]`, `[3, 1, S, W]` or, for TND, `[3, T, W]`: tables of T, H and W.
        mrope_section: number of the R / 2 frequencies that T, H and W own, e.g. [24, 20, 20].
            Frequencies beyond R / 2 are ignored, as in vLLM's and sgl-kernel-npu's kernels.
        section_layout: "chunked", T..TH..HW..W (Qwen2-VL, Qwen2.5-VL), or "interleaved", THWTHW..TT
            (Qwen3-VL, Qwen3.5).

    Returns:
        The rotated q and k, with the shapes and dtypes of q and k; None if k is None.
        Differentiable in q and k.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: a shape or a device is invalid, sections do not fit R / 2, cos or sin require a
            gradient, or `inplace` is set and a gradient is needed.

    Source: transformers 4 `apply_multimodal_rotary_pos_emb` (Qwen2-VL), and transformers 5
    `recomposition_frequencies` of Qwen2-VL and Qwen3-VL.
    """
    args = _prepare(
        q, k, cos, sin, mrope_section, unsqueeze_dim, section_layout=section_layout, layout=layout,
        pair_layout=pair_layout, rotary_dim=rotary_dim, inverse=inverse, inplace=inplace,
    )  # fmt: skip
    return op.rotate(k, inplace, *args)


def _prepare(
    q, k, cos, sin, mrope_section, unsqueeze_dim=1, *, section_layout, layout=None,
    pair_layout="half", rotary_dim=None, inverse=False, inplace=False,
):  # fmt: skip
    """Check the public arguments; return the operator's inputs."""
    layout = arguments.resolve_layout(q, layout, unsqueeze_dim)
    _check(q, k, cos, sin, layout, pair_layout, inplace)
    rotary_dim = arguments.resolve_rotary_dim(rotary_dim, cos.shape[-1], q.shape[-1])
    section = resolve_section(mrope_section, section_layout, rotary_dim // 2)
    cos, sin = (table if table.dim() == 4 else table[:, None] for table in (cos, sin))
    k = arguments.k_or_no_heads(q, k, layout)
    settings = section, section_layout, layout, pair_layout, bool(inverse), rotary_dim
    return q, k, cos, sin, None, *settings


def _check(q, k, cos, sin, layout, pair_layout, inplace) -> None:
    arguments.check_pair_layout(pair_layout)
    arguments.check_heads(q, k, layout)
    arguments.check_tables(cos, sin, q)
    packed = layout == "TND"
    if cos.dim() != (3 if packed else 4) or cos.shape[0] != 3:
        raise check.shape("cos", cos, "[3, T, W]" if packed else "[3, B, S, W]")
    batch, length = arguments.size(q, layout, "B"), arguments.size(q, layout, "S")
    rows = cos[:, None] if packed else cos
    arguments.check_table_size("cos", rows, 2, 1, batch, length, False)
    if inplace:
        check.inplace({"q": q, "k": k}, {"cos": cos, "sin": sin})


def apply_multimodal_rotary_pos_emb_cached(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    mrope_section: list[int],
    section_layout: str,
    pair_layout: str = "half",
    rotary_dim: int | None = None,
    *,
    head_dim: int | None = None,
    inverse: bool = False,
    inplace: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Apply `apply_multimodal_rotary_pos_emb` with angles from a cache, by position, for servers.

    Args:
        positions: `[3, T]` int32 or int64, rows T, H, W; or `[T]` for text, the same for all axes.
        q, k: `[T, N, D]`, or `[T, N * D]` with `head_dim=D`; k may be None.
        cos_sin_cache: `[max_position, R]`, cosines in the first R / 2 columns, sines in the rest.
        mrope_section, section_layout, pair_layout, inverse, inplace: as in
            `apply_multimodal_rotary_pos_emb`.
        rotary_dim: R; None: the cache's width. If given, it must equal that width.
        head_dim: D, for two-dimensional q and k.

    Returns:
        The rotated q and k, with the shapes and dtypes of q and k; None if k is None.
        Differentiable in q and k.

    Raises:
        As `apply_multimodal_rotary_pos_emb`; ValueError for a position outside the cache (on the
        CPU; on a device its token becomes NaN).

    Source: SGLang and vLLM `MRotaryEmbedding`.
    """
    args = _prepare_cached(
        positions, q, k, cos_sin_cache, mrope_section, section_layout, pair_layout, rotary_dim,
        head_dim=head_dim, inverse=inverse, inplace=inplace,
    )  # fmt: skip
    q_out, k_out = op.rotate(k, inplace, *args)
    if inplace:
        return q, k
    return q_out.view(q.shape), None if k is None else k_out.view(k.shape)


def _prepare_cached(
    positions, q, k, cos_sin_cache, mrope_section, section_layout, pair_layout="half",
    rotary_dim=None, *, head_dim=None, inverse=False, inplace=False,
):  # fmt: skip
    """Check the public arguments; return the operator's inputs."""
    q = _split_heads("q", q, head_dim)
    k = None if k is None else _split_heads("k", k, head_dim)
    _check_cached(positions, q, k, cos_sin_cache, pair_layout, rotary_dim, inplace)
    width = cos_sin_cache.shape[1]
    section = resolve_section(mrope_section, section_layout, width // 2)
    cos, sin = cos_sin_cache[None, None].chunk(2, dim=-1)
    positions = positions.expand(3, -1)[:, None]
    k = arguments.k_or_no_heads(q, k, "TND")
    settings = section, section_layout, "TND", pair_layout, bool(inverse), width
    return q, k, cos, sin, positions, *settings


def _check_cached(positions, q, k, cos_sin_cache, pair_layout, rotary_dim, inplace) -> None:
    arguments.check_heads(q, k, "TND")
    arguments.check_pair_layout(pair_layout)
    check.tensor("cos_sin_cache", cos_sin_cache)
    if cos_sin_cache.dim() != 2 or cos_sin_cache.shape[1] % 2:
        raise check.shape("cos_sin_cache", cos_sin_cache, "[max_position, R] with R even")
    width = cos_sin_cache.shape[1]
    if rotary_dim not in (None, width) or width > q.shape[-1]:
        raise ValueError(
            f"rotary_dim: got {rotary_dim}, needs the cache's width {width}, "
            f"at most head_dim {q.shape[-1]}"
        )
    arguments.check_table("cos_sin_cache", cos_sin_cache, q)
    shapes = ((q.shape[0],), (3, q.shape[0]))
    arguments.check_positions("positions", positions, shapes, cos_sin_cache.shape[0], q)
    if inplace:
        check.inplace({"q": q, "k": k}, {"positions": positions, "cos_sin_cache": cos_sin_cache})


def _split_heads(name, x, head_dim):
    check.floating(name, x)
    if x.dim() == 3 and head_dim in (None, x.shape[-1]):
        return x
    if x.dim() != 2 or not head_dim or x.shape[-1] % head_dim:
        needs = f"[T, N, D], or [T, N * D] with head_dim=D (got head_dim {head_dim})"
        raise check.shape(name, x, needs)
    return x.view(*x.shape[:-1], x.shape[-1] // head_dim, head_dim)


explains("apply_multimodal_rotary_pos_emb", op.rotate.forward, _prepare)
explains("apply_multimodal_rotary_pos_emb_cached", op.rotate.forward, _prepare_cached)
