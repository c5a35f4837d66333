"""Attention: one function for dense, packed and paged tensors, with every mask explicit."""

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
    """Compute attention: `softmax(scale q k^T + bias) v`.

    Only the masks that are passed apply: attention is not causal unless `is_causal`, and a mask is
    never ignored. A query with no unmasked key gets 0.

    NaN: a masked element, also one with a bias of -inf, may hold a NaN. On the CPU it affects no
    result, whether it is in q, k, v or a gradient. On an NPU this holds for k only, in the forward
    pass without a bias; elsewhere a tile's matrix product computes 0 times NaN (see
    docs/evidence/numerics.md).

    Args:
        q: `[B, S, N, D]` in the order of `layout`: BSND, BNSD, SBND, or TND for packed sequences
            `[T, N, D]`; BSH and SBH fold heads and dimension, `[B, S, N * D]`.
        k, v: `[B, Sk, Nk, D]` in the order of `layout`. N must be a multiple of Nk; v may have
            another D. With a block_table they are `[blocks, block_size, Nk, D]`, for BNSD `[blocks,
            Nk, block_size, D]`, and with num_key_value_heads also `[blocks, block_size, Nk * D]`.
        num_heads, num_key_value_heads: N and Nk for folded heads; Nk defaults to N.
        is_causal: a query attends only to keys up to its own position.
        causal_alignment: if q and k differ in length, the diagonal of is_causal and window goes
            through the last query and key ("bottom_right") or the first ("top_left", as in torch's
            SDPA).
        window: (left, right), the number of keys before and after the diagonal to attend to; -1 for
            all.
        attn_mask: bool, True where a query attends to a key: `[Sq, Sk]`, or `[B, N, Sq, Sk]` in
            which any dimension may be 1. It is the whole mask, so it excludes is_causal and window.
        bias: added to the scores; shapes as attn_mask, q's dtype or float32. Differentiable.
        cu_seqlens_q, cu_seqlens_k: for TND, int32 or int64 `[n + 1]`: the starts of n sequences,
            then the end of the last. The first is 0, the last at most the number of tokens.
            cu_seqlens_k defaults to cu_seqlens_q. Results and gradients of tokens behind the last
            sequence are 0.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths; None: the number of tokens.
        seqlens_k: int32 or int64 `[n]`: the number of keys of each sequence. Required with a
            block_table.
        block_table: int32 `[n, ..]`: the blocks of a paged cache that hold each sequence's keys.
            Such a call has no gradient.
        scale: factor of the scores; None: `D ** -0.5`.
        softcap: c: scores become `c tanh(score / c)`, before the bias.
        sinks: `[N]`: one extra score per head, without a value. Differentiable.
        dropout_p: probability of dropping a weight, in steps of 2**-16; the kept weights are
            divided by the probability of being kept. The backward pass draws the same mask again.
        deterministic: results and gradients have the same bits in every run.
        return_lse: also return the log of the softmax's denominator.
        cu_seqlens_cpu, seqlens_k_cpu: the same lengths in host memory, as tensors or lists of ints
            (a pair if queries and keys differ), for vendor operators that take lists.
        generator: for dropout, on q's device; None: the device's default generator.

    Returns:
        out: shape, layout and dtype of q, with v's D. With return_lse also an fp32 tensor (fp64 if
        q is) `[B, N, Sq]`, for TND `[N, T]`. Index values on a device are not checked. Kernels
        access no memory outside a tensor for invalid values, and read NaN for a block outside the
        cache.

    Raises:
        TypeError: a dtype is not supported, or dtypes differ; only autocast converts tensors.
        ValueError: a shape, a device or lengths (on the CPU) are invalid, or arguments exclude each
            other.

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
    """Check the public arguments; return the operator's arguments: q, k, v, extra and rule."""
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
