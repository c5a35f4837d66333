"""Computes attention with torch_npu's operators. plan.py chooses the operator and its arguments.

The inference operators return lse, the log of the softmax's denominator. The training operators
return a maximum and a sum for each row, from which lse is computed. The backward operators get lse
as the maximum and 1 as the sum, so only lse is saved.
"""

from __future__ import annotations

import torch

from npu_ops.core.hardware import is_captured
from npu_ops.ops.attention.arguments import Extra, Rule
from npu_ops.ops.attention.plan import AttentionPlan
from npu_ops.ops.attention.routing import plan_of
from npu_ops.ops.attention.table import COMPRESSED

_STATISTICS = 8  # copies of each number per row in softmax_max and softmax_sum
_kept: dict[torch.device, torch.Tensor] = {}


def attention(q, k, v, extra: Extra, rule: Rule, out, lse) -> None:
    """Write `out` and `lse`."""
    plan = plan_of(q, k, v, extra, rule, "npu")
    q, out, lse = _owned(extra.cu_seqlens_q_cpu, (q,), (out, lse))
    k, v = _owned(extra.cu_seqlens_k_cpu, (k, v))
    if not q.shape[2]:
        return
    run = _infer if "infer" in plan.operator else _train
    found, log_sum = run(plan, q, k, v, extra, rule)
    found = _normal(found, plan, q.shape[0], q.shape[1])[..., : v.shape[3]]
    if extra.mask is not None:  # for a query without a key
        nothing = ~extra.mask.any(-1).expand(lse.shape)
        found = found.masked_fill(nothing[..., None], 0)
        log_sum = log_sum.masked_fill(nothing, -torch.inf)
    if extra.sinks is not None:  # an extra score in the denominator
        both = torch.logaddexp(log_sum, extra.sinks[:, None].expand_as(lse))
        found, log_sum = found * (log_sum - both).exp()[..., None], both
    out.copy_(found)
    lse.copy_(log_sum)


def attention_backward(
    grad_out, grad_lse, out, lse, q, k, v, extra: Extra, rule: Rule,
    grad_q, grad_k, grad_v, grad_bias, grad_sinks,
) -> None:  # fmt: skip
    """Write the gradients; grad_bias and grad_sinks may be None."""
    plan = plan_of(q, k, v, extra, rule, "npu")
    starts_q, starts_k = extra.cu_seqlens_q_cpu, extra.cu_seqlens_k_cpu
    q, grad_out, out, lse, grad_q = _owned(starts_q, (q, grad_out, out, lse), (grad_q,))
    k, v, grad_k, grad_v = _owned(starts_k, (k, v), (grad_k, grad_v))
    if not q.shape[2]:
        for gradient in (grad_k, grad_v, grad_bias, grad_sinks):
            if gradient is not None:
                gradient.zero_()
        return
    mine = [_padded(x, plan) for x in (q, k, v, grad_out, out)]
    given_q, given_k, given_v, dy, result = (_given(x, plan) for x in mine)
    # For a row without a key: weights become exp(-inf - 0), not exp(-inf + inf).
    rows = lse.masked_fill(lse == -torch.inf, 0)
    rows = rows[0].transpose(0, 1) if plan.layout == "TND" else rows
    statistics = rows[..., None].expand(*rows.shape, _STATISTICS).contiguous()
    grad = getattr(torch.ops.npu, plan.operator.replace("attention", "attention_grad", 1))
    found = grad(
        given_q, given_k, given_v, dy, q.shape[1], plan.layout,
        softmax_max=statistics, softmax_sum=torch.ones_like(statistics),
        softmax_in=statistics.new_empty(0), attention_in=result, scale_value=rule.scale,
        **_told(plan, q, k, extra), **_spelled(plan),
    )  # fmt: skip
    for gradient, value in zip((grad_q, grad_k, grad_v), found[:3], strict=True):
        batch, heads = gradient.shape[:2]
        gradient.copy_(_normal(value, plan, batch, heads)[..., : gradient.shape[3]])
    if grad_bias is not None:
        grad_bias.copy_(found[3].float().sum_to_size(grad_bias.shape))
    if grad_sinks is not None:
        delta = (grad_out.float() * out.float()).sum(-1)
        shares = (extra.sinks[:, None] - lse).exp() * delta
        grad_sinks.copy_(-shares.sum((0, 2)))


def _owned(starts, read, written=()):
    """Return views of tensors `[1, heads, tokens, ...]` without the tokens after the last sequence.

    torch_npu's operators take no such tokens. They are set to 0 in the tensors in `written`.
    """
    if starts is None:
        return *read, *written
    end = int(starts[-1])
    for x in written:
        x[:, :, end:].zero_()
    return [x[:, :, :end] for x in (*read, *written)]


def _train(plan: AttentionPlan, q, k, v, extra: Extra, rule: Rule):
    given = [_given(_padded(x, plan), plan) for x in (q, k, v)]
    operator = getattr(torch.ops.npu, plan.operator)
    out, top, total, *_ = operator(
        *given, q.shape[1], plan.layout, scale=rule.scale, **_told(plan, q, k, extra),
        **_spelled(plan),
    )  # fmt: skip
    log_sum = top[..., 0] + total[..., 0].log()
    return out, log_sum.transpose(0, 1)[None] if plan.layout == "TND" else log_sum


def _told(plan: AttentionPlan, q, k, extra: Extra) -> dict:
    """Return the keyword arguments of torch_npu's training operators: mask, bias and lengths."""
    told = {"sparse_mode": plan.sparse_mode, "atten_mask": _mask(plan, q, k, extra)}
    if extra.bias is not None:
        full = (-1, q.shape[1], q.shape[2], k.shape[2])
        told |= {"pse": extra.bias.to(q.dtype).expand(full).contiguous(), "pse_type": 0}
    if plan.lengths == "ends":
        told |= {
            "actual_seq_qlen": _ends(extra.cu_seqlens_q_cpu),
            "actual_seq_kvlen": _ends(extra.cu_seqlens_k_cpu),
            "softmax_layout": "TND",  # tokens first, like the other tensors
        }
    return told


def _spelled(plan: AttentionPlan) -> dict:
    """Return the arguments for the keys before and after the diagonal; v1 spells them "tockens"."""
    name = "tokens" if plan.operator.endswith("v2") else "tockens"
    return {f"pre_{name}": plan.pre_tokens, f"next_{name}": plan.next_tokens}


def _infer(plan: AttentionPlan, q, k, v, extra: Extra, rule: Rule):
    paged = extra.block_table is not None
    second = plan.operator.endswith("v2")
    lengths = ("actual_seq_qlen", "actual_seq_kvlen")
    lengths = lengths if second else ("actual_seq_lengths", "actual_seq_lengths_kv")
    told = dict(zip(lengths, _lengths(plan, q, extra), strict=True))
    if paged:
        told |= {"block_table": extra.block_table, "block_size": k.shape[2]}
        keys = [_blocks(x) for x in (k, v)]
    else:
        keys = [_given(_padded(x, plan), plan) for x in (k, v)]
    names = ("num_query_heads", "softmax_scale", "return_softmax_lse")
    names = names if second else ("num_heads", "scale", "softmax_lse_flag")
    numbers = dict(zip(names, (q.shape[1], rule.scale, True), strict=True))
    out, log_sum = getattr(torch.ops.npu, plan.operator)(
        _given(_padded(q, plan), plan), *keys, **told, **numbers, num_key_value_heads=k.shape[1],
        atten_mask=_mask(plan, q, k, extra), sparse_mode=plan.sparse_mode,
        pre_tokens=plan.pre_tokens, next_tokens=plan.next_tokens, input_layout=plan.layout,
    )  # fmt: skip
    log_sum = log_sum[..., 0]
    # For a query without a key, the operator returns inf.
    log_sum = log_sum.masked_fill(log_sum == torch.inf, -torch.inf)
    if plan.layout != "TND":
        return out, log_sum
    rows = log_sum.view(q.shape[0], -1, q.shape[1])  # packed queries are a batch of one
    return out, rows.transpose(1, 2)


def _lengths(plan: AttentionPlan, q, extra: Extra):
    """Return the queries' ends, and the keys' ends or lengths.

    None for queries that are not packed, and for dense keys.
    """
    queries = None
    if extra.cu_seqlens_q_cpu is not None:
        queries = _ends(extra.cu_seqlens_q_cpu)
    elif plan.layout == "TND":
        queries = [q.shape[2] * (b + 1) for b in range(q.shape[0])]
    if plan.lengths == "none":
        return queries, None
    each = plan.lengths == "each"
    return queries, extra.seqlens_k_cpu.tolist() if each else _ends(extra.cu_seqlens_k_cpu)


def _ends(starts) -> list[int]:
    return starts[1:].tolist()


def _mask(plan: AttentionPlan, q, k, extra: Extra):
    """Return the operator's mask, in which True hides a key.

    A dense mask is expanded, because the operator misreads broadcast rows.
    """
    if plan.mask == "none":
        return None
    if plan.mask == "compressed":
        return _compressed(q.device)
    return ~extra.mask.expand(-1, -1, q.shape[2], k.shape[2])


def _compressed(device: torch.device) -> torch.Tensor:
    """Return the compressed causal mask, cached per device.

    During a graph capture it is not cached, because its memory would belong to the graph.
    """
    if device not in _kept:
        with torch.inference_mode(False):
            mask = torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool, device=device).triu(1)
        if is_captured(device):
            return mask
        _kept[device] = mask
    return _kept[device]


def _padded(x, plan: AttentionPlan):
    """Pad each head with zeros, which do not change the scores."""
    to = plan.pad_head_dim
    return torch.nn.functional.pad(x, (0, to - x.shape[3])) if to else x


def _given(x, plan: AttentionPlan):
    """Convert a tensor from normal form to the operator's layout."""
    if plan.layout == "BNSD":
        return x.contiguous()
    if plan.layout == "SBH":
        return x.permute(2, 0, 1, 3).flatten(2).contiguous()
    x = x.transpose(1, 2)
    return (x.flatten(0, 1) if plan.layout == "TND" else x).contiguous()


def _normal(x, plan: AttentionPlan, batch: int, heads: int):
    """The inverse of `_given`."""
    if plan.layout == "BNSD":
        return x
    if plan.layout == "SBH":
        return x.unflatten(2, (heads, -1)).permute(1, 2, 0, 3)
    x = x.unflatten(0, (batch, -1)) if plan.layout == "TND" else x
    return x.transpose(1, 2)


def _blocks(cache):
    """Return `[blocks, heads, size, dim]`; `[blocks, size, heads * dim]` if memory has that order.

    cache: `[blocks, heads, size, dim]`, any strides.
    """
    return cache if cache.is_contiguous() else cache.transpose(1, 2).flatten(2)
