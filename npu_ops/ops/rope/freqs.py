"""Rotates q and k by given angles, with the arguments that Megatron passes."""

from __future__ import annotations

import torch

from npu_ops.core import check, env
from npu_ops.core.registry import explains
from npu_ops.ops.rope import arguments, op, packing


def apply_rotary_pos_emb_freqs(
    q: torch.Tensor,
    k: torch.Tensor | None,
    freqs: torch.Tensor,
    *,
    layout: str = "SBND",
    pair_layout: str = "half",
    mscale: float = 1.0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
    inverse: bool = False,
    inplace: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate q and k by angles `freqs`, scaled by `mscale`.

    Args:
        q: `[S, B, N, D]` (or another 4-D layout), or `[T, N, D]` with layout "TND".
        k: like q, with any number of heads; or None.
        freqs: `[S, 1, 1, R]`, `[S, B, 1, R]` (mrope) or, for TND, `[T, 1, 1, R]` or
            `[max_s, 1, 1, R]`; full-width, R <= D. Elements from R on are copied.
        layout, pair_layout, inverse, inplace: as in `apply_rotary_pos_emb`.
        mscale: multiplies cos and sin (YaRN).
        cu_seqlens: for TND: `[n + 1]` with the leading 0, of the whole sequences for any cp_size.
            Results of tokens after the last sequence are 0.
        max_seqlen: if freqs have more rows than this, each row belongs to a packed token, else to a
            position. None: rows belong to packed tokens if there are as many as tokens on all
            context-parallel ranks.
        cp_size, cp_rank: context parallelism, only with cu_seqlens: each sequence has 2 cp_size
            equal chunks, and this rank has chunks cp_rank and 2 cp_size - 1 - cp_rank. Without
            cu_seqlens, freqs belong to this rank's tokens.

    Returns:
        The rotated q and k, with the shapes and dtypes of q and k; None if k is None.
        Differentiable in q and k.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: a shape or a device is invalid; freqs require a gradient; `inplace` is set and a
            gradient is needed; cp_rank is not below cp_size; cp_size is not 1 without cu_seqlens;
            lengths are invalid or longer than freqs (on the CPU; on a device the tokens concerned
            become NaN, and all tokens if lengths decrease, do not begin with 0 or end behind the
            tokens).

    Source: Megatron-LM `megatron/core/models/common/embeddings/rope_utils.py`.
    """
    args = _prepare(
        q, k, freqs, layout=layout, pair_layout=pair_layout, mscale=mscale, cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen, cp_size=cp_size, cp_rank=cp_rank, inverse=inverse, inplace=inplace,
    )  # fmt: skip
    return op.rotate(k, inplace, *args)


def _prepare(
    q, k, freqs, *, layout="SBND", pair_layout="half", mscale=1.0, cu_seqlens=None,
    max_seqlen=None, cp_size=1, cp_rank=0, inverse=False, inplace=False,
):  # fmt: skip
    """Check the public arguments; return the operator's inputs."""
    layout = arguments.resolve_layout(q, layout, 1)
    _check(q, k, freqs, layout, pair_layout, mscale, cu_seqlens, cp_size, cp_rank, inplace)
    cos, sin = _cos_sin(freqs, mscale)
    if env.settings.consistent:  # servers and Megatron also round tables to the model's dtype
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)
    positions = None
    if cu_seqlens is not None:
        rows = q.shape[0], freqs.shape[0], max_seqlen, cp_size, cp_rank
        positions = packing.packed_rows(cu_seqlens, *rows)
    k = arguments.k_or_no_heads(q, k, layout)
    return q, k, cos, sin, positions, layout, pair_layout, bool(inverse), freqs.shape[-1]


def _check(
    q, k, freqs, layout, pair_layout, mscale, cu_seqlens, cp_size, cp_rank, inplace
) -> None:  # fmt: skip
    arguments.check_pair_layout(pair_layout)
    arguments.check_heads(q, k, layout)
    _check_freqs(freqs, q)
    if not isinstance(mscale, (int, float)):
        raise TypeError(f"mscale: got {type(mscale).__name__}, needs a number")
    _check_packing(cu_seqlens, q, layout, cp_size, cp_rank)
    batch, length = arguments.size(q, layout, "B"), arguments.size(q, layout, "S")
    arguments.check_table_size("freqs", freqs, 0, 1, batch, length, cu_seqlens is not None)
    if inplace:
        check.inplace({"q": q, "k": k}, {"freqs": freqs})


def _check_freqs(freqs, q):
    arguments.check_table("freqs", freqs, q)
    if freqs.dim() != 4 or freqs.shape[2] != 1:
        raise check.shape("freqs", freqs, "[S, 1 or B, 1, R]")
    width = freqs.shape[-1]
    if width % 2 or not 0 < width <= q.shape[-1]:
        needs = f"an even number of columns up to head_dim {q.shape[-1]}"
        raise check.shape("freqs", freqs, needs)


def _check_packing(cu_seqlens, q, layout, cp_size, cp_rank):
    if cu_seqlens is not None and layout != "TND":
        raise ValueError(f"cu_seqlens: got a value with layout {layout}, needs TND")
    if cu_seqlens is not None:
        arguments.check_cu_seqlens(cu_seqlens, q)
    for name, value in (("cp_size", cp_size), ("cp_rank", cp_rank)):
        if not isinstance(value, int):
            raise TypeError(f"{name}: got {type(value).__name__}, needs an int")
    if cp_size != 1 and cu_seqlens is None:
        needs = "1, because freqs without packed sequences are only this rank's"
        raise ValueError(f"cp_size: got {cp_size} without cu_seqlens, needs {needs}")
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank: got {cp_rank}, needs 0 <= cp_rank < cp_size {cp_size}")


def _cos_sin(freqs, mscale):
    """Return tables [1 or B, S, R] in fp32 (fp64 for fp64 freqs)."""
    angles = freqs.squeeze(2).transpose(0, 1)
    angles = angles if angles.dtype == torch.float64 else angles.float()
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if mscale == 1 else (cos * mscale, sin * mscale)


explains("apply_rotary_pos_emb_freqs", op.rotate.forward, _prepare)
