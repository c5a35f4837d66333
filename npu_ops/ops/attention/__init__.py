"""Attention: one call for dense, packed and paged tensors, with every mask in the open."""

from __future__ import annotations

import torch

from npu_ops.core import check, rng
from npu_ops.core.registry import explains
from npu_ops.ops.attention import op
from npu_ops.ops.attention.arguments import (
    LAYOUTS,
    Extra,
    Rule,
    check_heads,
    check_lengths,
    dense,
    in_layout,
    longest,
    normal,
    number,
    on_host,
    pair_on_host,
    scale_of,
    split_heads,
    window_of,
)
from npu_ops.ops.attention.plan import AttentionPlan, AttentionSpec, plan_attention
from npu_ops.ops.attention.reference import compute_dtype

__all__ = ["attention", "plan_attention", "AttentionPlan", "AttentionSpec"]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: str = "BSND",
    num_heads: int | None = None,
    num_key_value_heads: int | None = None,
    is_causal: bool = False,
    causal_alignment: str = "bottom_right",
    window: tuple[int, int] | None = None,
    attn_mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqlens_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
    cu_seqlens_cpu=None,
    seqlens_k_cpu=None,
    generator: torch.Generator | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """What each query reads from the values: `softmax(scale q k^T + bias) v`.

    Nothing is masked that is not asked for: not causal unless `is_causal`, and a mask is never
    dropped. A query that no key takes part for gets 0. A key that takes no part may hold a NaN,
    forward; not its value, which is multiplied by 0. Dropout draws its mask again in backward.

    Args:
        q: `[B, S, N, D]` in the order of `layout`: BSND, BNSD, SBND, or TND for packed sequences
            `[T, N, D]`; BSH and SBH fold heads and dimension, `[B, S, N * D]`.
        k, v: as q, with their own length; N a multiple of their heads; v may have another D.
            With a block_table `[blocks, block_size, N, D]`, for BNSD `[blocks, N, block_size, D]`,
            and with num_key_value_heads also `[blocks, block_size, N * D]`.
        num_heads, num_key_value_heads: for BSH and SBH; the latter is num_heads unless given.
        is_causal: a query sees the keys up to its own.
        causal_alignment: where lengths differ, the diagonal of is_causal and window goes through
            the last query and key ("bottom_right") or the first ("top_left", as in torch's SDPA).
        window: (left, right), keys before and after the diagonal that take part, -1 for all.
        attn_mask: bool, True takes part: `[Sq, Sk]`, or `[B, N, Sq, Sk]` where each may be 1. It is
            the whole mask: without is_causal and window.
        bias: added to the scores; shapes as attn_mask, q's dtype or float32. Differentiable.
        cu_seqlens_q, cu_seqlens_k: for TND, int32 or int64 `[n + 1]`, the starts of n sequences and
            their end: 0 first, the number of tokens last. cu_seqlens_k is cu_seqlens_q if None.
        max_seqlen_q, max_seqlen_k: bounds of their lengths; None: the number of tokens.
        seqlens_k: int32 or int64 `[n]`: of each sequence's keys the first so many are there. Needed
            with a block_table.
        block_table: int32 `[n, ..]`: the blocks of a paged cache that hold each sequence's keys.
            There is no gradient then.
        scale: of the scores; None: `D ** -0.5`.
        softcap: c: scores become `c tanh(score / c)`, before the bias.
        sinks: `[N]`: one more score for each head, which has no value. Differentiable.
        dropout_p: weights are dropped with this probability, in steps of 2**-16; the others
            are divided by the probability of being kept.
        deterministic: the same bits from run to run, also of gradients.
        return_lse: return the log of the softmax's denominator too.
        cu_seqlens_cpu, seqlens_k_cpu: the same lengths in host memory, tensors or lists (of ints; a
            pair where queries' and keys' differ), for operators of the vendor that take lists.
        generator: of dropout; on q's device; None: its default one.

    Returns:
        out in q's layout, dtype and heads, with v's D; and with return_lse the fp32 `[B, N, Sq]`,
        for TND `[N, T]` (fp64 where q is). On a device index values are not checked:
        nothing outside of a tensor is read or written, and a block that is not there reads as NaN.

    Raises:
        TypeError: a dtype, also a mixture of them: nothing is converted, but under autocast.
        ValueError: a shape, a device, lengths (on the CPU), arguments that exclude each other.

    Source: FlashAttention, arXiv:2307.08691; torch `scaled_dot_product_attention`.
    """
    q, k, v, extra, rule, folded = _prepare(
        q, k, v, layout, num_heads, num_key_value_heads, is_causal, causal_alignment, window,
        attn_mask, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqlens_k,
        block_table, scale, softcap, sinks, dropout_p, deterministic, cu_seqlens_cpu, seqlens_k_cpu,
        generator,
    )  # fmt: skip
    if rule.dropout_p:
        extra = extra._replace(rng_state=rng.new_state(q.device, generator))
    out, lse = op.call(q, k, v, extra, rule)
    out = in_layout(out, rule.layout)
    out = out.flatten(-2) if folded else out
    if not return_lse:
        return out
    return out, lse.squeeze(0) if rule.layout == "TND" else lse


def _prepare(
    q, k, v, layout="BSND", num_heads=None, num_key_value_heads=None, is_causal=False,
    causal_alignment="bottom_right", window=None, attn_mask=None, bias=None, cu_seqlens_q=None,
    cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, seqlens_k=None, block_table=None,
    scale=None, softcap=None, sinks=None, dropout_p=0.0, deterministic=False, cu_seqlens_cpu=None,
    seqlens_k_cpu=None, generator=None,
):  # fmt: skip
    """Check the public arguments; return them as the implementations take them."""
    paged, folded = block_table is not None, layout in ("BSH", "SBH")
    q, k, v, layout = _heads(q, k, v, layout, num_heads, num_key_value_heads, paged)
    check.one_of("causal_alignment", causal_alignment, ("bottom_right", "top_left"))
    left, right = window_of(is_causal, window)
    packed = _check_packed(layout, cu_seqlens_q, cu_seqlens_k, seqlens_k, paged)
    for name, x in (("attn_mask", attn_mask), ("bias", bias)):
        if x is not None and (packed or paged):
            raise ValueError(f"{name}: got one with packed or paged tokens, needs None")
    if attn_mask is not None and (is_causal or window is not None):
        name = "is_causal" if is_causal else "window"
        raise ValueError(f"{name}: got one with attn_mask, needs all of the mask in one of them")
    cu_seqlens_q_cpu, cu_seqlens_k_cpu = pair_on_host(cu_seqlens_cpu)
    if cu_seqlens_k is None and packed and not paged:
        cu_seqlens_k = cu_seqlens_q
    extra = Extra(
        bias=_bias(bias, q, k),
        mask=_mask(attn_mask, q, k),
        sinks=_sinks(sinks, q),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqlens_k=seqlens_k,
        block_table=block_table,
        cu_seqlens_q_cpu=cu_seqlens_q_cpu,
        cu_seqlens_k_cpu=None if cu_seqlens_k is None else cu_seqlens_k_cpu,
        seqlens_k_cpu=on_host("seqlens_k_cpu", seqlens_k_cpu),
    )
    keys = _check_extra(q, k, v, extra)
    rule = Rule(
        layout=layout,
        max_seqlen_q=_longest("max_seqlen_q", max_seqlen_q, cu_seqlens_q, q.shape[2]),
        max_seqlen_k=_longest("max_seqlen_k", max_seqlen_k, cu_seqlens_k, keys),
        scale=scale_of(scale, q.shape[3]),
        window_left=left,
        window_right=right,
        bottom_right=causal_alignment == "bottom_right",
        softcap=0.0 if softcap is None else _softcap(softcap),
        dropout_p=_dropout(dropout_p, generator, q),
        deterministic=bool(deterministic),
        training=torch.is_grad_enabled()
        and any(x is not None and x.requires_grad for x in (q, k, v, bias, sinks)),
    )
    return q, k, v, extra, rule, folded


def _heads(q, k, v, layout, num_heads, num_key_value_heads, paged):
    """q, k and v in normal form, and the layout of the output."""
    check.one_of("layout", layout, LAYOUTS)
    key_heads = num_heads if num_key_value_heads is None else num_key_value_heads
    q, unfolded = split_heads("q", q, layout, num_heads)
    key_layout = layout
    if paged:
        check.floating("k", k)
        key_layout = "BSH" if k.dim() == 3 else "BNSD" if layout == "BNSD" else "BSND"
    (k, key_layout), (v, _) = (
        split_heads(n, x, key_layout, key_heads) for n, x in zip("kv", (k, v), strict=True)
    )
    device = q.device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device)
    if autocast and q.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)  # as torch's own attention does
        q, k, v = (x.to(dtype) for x in (q, k, v))
    q, k, v = normal(q, unfolded), normal(k, key_layout), normal(v, key_layout)
    check_heads(q, k, v, paged)
    return q, k, v, unfolded


def _check_packed(layout, cu_seqlens_q, cu_seqlens_k, seqlens_k, paged) -> bool:
    """Check that what is given goes together; return whether queries are packed."""
    if layout == "TND" and cu_seqlens_q is None:
        raise ValueError("cu_seqlens_q: got None, needs the starts of the sequences for layout TND")
    if layout != "TND" and cu_seqlens_q is not None:
        raise ValueError(f"layout: got {layout!r} with cu_seqlens_q, needs 'TND'")
    if cu_seqlens_k is not None and (paged or cu_seqlens_q is None):
        raise ValueError("cu_seqlens_k: got one, needs cu_seqlens_q and no block_table with it")
    if paged and seqlens_k is None:
        raise ValueError("seqlens_k: got None, needs the keys of each sequence for a block_table")
    if seqlens_k is not None and layout == "TND" and not paged:
        raise ValueError("seqlens_k: got one with packed keys, needs cu_seqlens_k in its place")
    return layout == "TND"


def _check_extra(q, k, v, extra: Extra) -> int:
    """Check lengths and blocks against the tokens; return how many keys there may be."""
    sequences, keys = q.shape[0], k.shape[2]
    if extra.cu_seqlens_q is not None:
        check_lengths("cu_seqlens_q", extra.cu_seqlens_q, q, None, q.shape[2])
        sequences = extra.cu_seqlens_q.numel() - 1
    if extra.cu_seqlens_k is not None:
        check_lengths("cu_seqlens_k", extra.cu_seqlens_k, q, None, keys)
        if extra.cu_seqlens_k.numel() != sequences + 1:
            raise check.shape("cu_seqlens_k", extra.cu_seqlens_k, f"[{sequences + 1}], as for q")
    if extra.block_table is not None:
        keys *= _check_blocks(extra.block_table, q, k, v, sequences)
    if extra.seqlens_k is not None:
        check_lengths("seqlens_k", extra.seqlens_k, q, sequences)
        longest("seqlens_k", keys, extra.seqlens_k, keys)
    for name, x, total in (
        ("cu_seqlens_cpu", extra.cu_seqlens_q_cpu, q.shape[2]),
        ("cu_seqlens_cpu", extra.cu_seqlens_k_cpu, keys),
        ("seqlens_k_cpu", extra.seqlens_k_cpu, None),
    ):
        if x is not None and (extra.seqlens_k if total is None else extra.cu_seqlens_q) is None:
            raise ValueError(f"{name}: got one, needs {name.removesuffix('_cpu')} with it")
        if x is not None:
            check_lengths(name, x, None, sequences + (total is not None), total)
    return keys


def _check_blocks(block_table, q, k, v, sequences: int) -> int:
    """Check a block_table; return how many blocks a sequence may have."""
    check.tensor("block_table", block_table)
    check.dtype("block_table", block_table, torch.int32)
    check.same_device("block_table", block_table, "q", q)
    if block_table.dim() != 2 or block_table.shape[0] != sequences:
        raise check.shape("block_table", block_table, f"[{sequences}, blocks]")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise ValueError("block_table: got one with inputs that require a gradient, needs no_grad")
    return block_table.shape[1]


def _longest(name, given, starts, bound: int) -> int:
    if given is not None and starts is None:
        raise ValueError(f"{name}: got {given!r}, needs packed sequences")
    return bound if given is None else longest(name, given, starts.diff(), bound)


def _bias(bias, q, k):
    bias = dense("bias", bias, q, k)
    if bias is not None:
        check.dtype("bias", bias, q.dtype, compute_dtype(q))
    return bias


def _mask(mask, q, k):
    mask = dense("attn_mask", mask, q, k)
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(
            f"attn_mask: got {check.short(mask.dtype)}, needs bool, True takes part (what is added "
            "is a bias)"
        )
    return mask


def _sinks(sinks, q):
    if sinks is None:
        return None
    check.floating("sinks", sinks)
    check.same_device("sinks", sinks, "q", q)
    if sinks.shape != q.shape[1:2]:
        raise check.shape("sinks", sinks, f"[{q.shape[1]}], one for each head of q")
    return sinks.to(compute_dtype(q)).contiguous()


def _softcap(softcap) -> float:
    if not softcap:
        raise ValueError(f"softcap: got {softcap!r}, needs a finite number above 0, or None")
    return number("softcap", softcap, 0, float("inf"), "a finite number above 0, or None")


def _dropout(p, generator, q) -> float:
    if not isinstance(generator, torch.Generator | None):
        raise TypeError(f"generator: got {type(generator).__name__}, needs a torch.Generator")
    if generator is not None and generator.device.type != q.device.type:
        raise ValueError(f"generator: got device {generator.device}, needs q's {q.device}")
    return number("dropout_p", p, 0, 1, "0 <= dropout_p < 1")


def _implementation_args(*args, return_lse=False, **kwargs):
    q, k, v, extra, rule, _ = _prepare(*args, **kwargs)
    return q, k, v, extra, rule, *op.outputs(q, k, v, *extra, *rule)


explains("attention", op.forward_table, _implementation_args)
