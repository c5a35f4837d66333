"""Attention: one call for dense, packed and paged tensors, with every mask in the open."""

from __future__ import annotations

import torch

from npu_ops.core import rng
from npu_ops.core.registry import explains
from npu_ops.core.signature import call_of
from npu_ops.ops.attention import op
from npu_ops.ops.attention.arguments import (
    UNLIMITED,
    Extra,
    Rule,
    for_all_keys,
    in_layout,
    in_one_form,
    keys_of,
)
from npu_ops.ops.attention.checks import check_call
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
    dropped. A query that no key takes part for gets 0. What takes no part, also by a bias of -inf,
    may hold a NaN: on the CPU it reaches nothing, whichever of q, k, v and the gradient it is in.
    On an NPU that is so of k, forward and without a bias; else a tile's product has 0 times NaN
    (see docs/evidence/numerics.md). Dropout draws its mask again in backward.

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
            their end: 0 first, the number of tokens or less last. cu_seqlens_k is cu_seqlens_q if
            None. Results and gradients of tokens behind the last sequence are 0.
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
    folded = layout in ("BSH", "SBH")
    q, k, v, extra, rule = _prepare(
        q, k, v, layout, num_heads, num_key_value_heads, is_causal, causal_alignment, window,
        attn_mask, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqlens_k,
        block_table, scale, softcap, sinks, dropout_p, deterministic, return_lse,
        cu_seqlens_cpu, seqlens_k_cpu, generator,
    )  # fmt: skip
    if rule.dropout_p:
        extra = extra._replace(rng_state=rng.new_state(q.device, generator))
    out, lse = op.forward(q, k, v, *extra, *rule)
    layout = rule.layout
    out = in_layout(out, layout)
    out = out.flatten(-2) if folded else out
    if not return_lse:
        return out
    return out, lse.squeeze(0) if layout == "TND" else lse


_Call = call_of(attention)


def _prepare(*args, **kwargs):
    """What implementations take, from the public function's arguments: q, k, v, extra and rule."""
    call = in_one_form(_Call(*args, **kwargs))
    check_call(call)
    return call.q, call.k, call.v, _extra(call), _rule(call)


def _extra(call) -> Extra:
    """Collect the optional tensors of a checked call, in the form that kernels read."""
    bias, mask, sinks = call.bias, call.attn_mask, call.sinks
    return Extra(
        bias=None if bias is None else for_all_keys(bias, call.k),
        mask=None if mask is None else for_all_keys(mask, call.k),
        sinks=None if sinks is None else sinks.to(compute_dtype(call.q)).contiguous(),
        cu_seqlens_q=call.cu_seqlens_q,
        cu_seqlens_k=call.cu_seqlens_k,
        seqlens_k=call.seqlens_k,
        block_table=call.block_table,
        cu_seqlens_q_cpu=call.cu_seqlens_cpu[0],
        cu_seqlens_k_cpu=None if call.cu_seqlens_k is None else call.cu_seqlens_cpu[1],
        seqlens_k_cpu=call.seqlens_k_cpu,
    )


def _rule(call) -> Rule:
    """Collect the settings of a checked call: mask, scale, dropout, lengths. No tensors."""
    queries, keys = call.q.shape[2], keys_of(call)
    left, right = UNLIMITED, UNLIMITED
    if call.window is not None:
        left, right = call.window
    tensors = call.q, call.k, call.v, call.bias, call.sinks
    return Rule(
        layout=call.layout,
        max_seqlen_q=queries if call.max_seqlen_q is None else call.max_seqlen_q,
        max_seqlen_k=keys if call.max_seqlen_k is None else call.max_seqlen_k,
        scale=call.q.shape[3] ** -0.5 if call.scale is None else float(call.scale),
        window_left=left,
        window_right=0 if call.is_causal else right,
        bottom_right=call.causal_alignment == "bottom_right",
        softcap=0.0 if call.softcap is None else float(call.softcap),
        dropout_p=float(call.dropout_p),
        deterministic=bool(call.deterministic),
        training=torch.is_grad_enabled()
        and any(x is not None and x.requires_grad for x in tensors),
    )


def _inputs(*args, **kwargs):
    q, k, v, extra, rule = _prepare(*args, **kwargs)
    return q, k, v, *extra, *rule


explains("attention", op.forward, _inputs)
