"""Makes the plan of a call (see plan.py) from the shapes, dtypes and strides of its tensors."""

from __future__ import annotations

import functools

import torch

from npu_ops.core import check, env, hardware
from npu_ops.ops.attention.arguments import Extra, Rule
from npu_ops.ops.attention.plan import AttentionPlan, AttentionSpec, plan_attention

# Arguments that aclnn.py passes and that older versions of torch_npu's operators lack.
_NEEDED = {
    "npu_fused_infer_attention_score_v2": "return_softmax_lse",
    "npu_fused_infer_attention_score": "softmax_lse_flag",
    "npu_fusion_attention": "softmax_layout",
    "npu_fusion_attention_v2": "softmax_layout",
    "npu_fusion_attention_v3": "softmax_layout",
}


def plan_of(
    q, k, v, extra: Extra, rule: Rule, device: str | None = None, lse_gradient: bool = False
) -> AttentionPlan:
    """Return the plan of a call on a device type. None: q's device type."""
    return plan_attention(spec_of(q, k, v, extra, rule, device or q.device.type, lse_gradient))


def operator_of(q, k, v, extra: Extra, rule: Rule, lse_gradient: bool = False) -> str:
    """Return the name of the operator that computes a call on the CPU."""
    return plan_of(q, k, v, extra, rule, "cpu", lse_gradient).operator


def spec_of(q, k, v, extra: Extra, rule: Rule, device: str, lse_gradient: bool) -> AttentionSpec:
    """Describe a call as an `AttentionSpec`."""
    packed, paged = extra.cu_seqlens_q is not None, extra.block_table is not None
    keys = "paged" if paged else "packed" if packed else "padded"
    keys = keys if packed or extra.seqlens_k is not None else "dense"
    limited = rule.window_left >= 0 or rule.window_right > 0
    causal = rule.window_right == 0
    return AttentionSpec(
        layout=rule.layout,
        heads=q.shape[1],
        kv_heads=k.shape[1],
        head_dim=q.shape[3],
        value_dim=v.shape[3],
        dtype=check.short(q.dtype),
        query_length=rule.max_seqlen_q if packed else q.shape[2],
        key_length=rule.max_seqlen_k if packed or paged else k.shape[2],
        same_lengths=packed and extra.cu_seqlens_k is extra.cu_seqlens_q,
        keys=keys,
        block_size=k.shape[2] if paged else 0,
        contiguous_blocks=not paged or (whole_blocks(k) and whole_blocks(v)),
        host_lengths=_on_host(extra, packed, keys),
        is_causal=causal,
        causal_alignment="bottom_right" if rule.bottom_right else "top_left",
        window=(rule.window_left, rule.window_right) if limited else None,
        mask=extra.mask is not None,
        bias=extra.bias is not None,
        softcap=bool(rule.softcap),
        nonpositive_scale=rule.scale <= 0,
        sinks=extra.sinks is not None,
        dropout=bool(rule.dropout_p),
        training=rule.training,
        lse_gradient=lse_gradient,
        # With torch's deterministic mode, torch_npu's kernels are deterministic.
        deterministic=rule.deterministic and not torch.are_deterministic_algorithms_enabled(),
        consistent=bool(env.settings.consistent),
        graph_capture=device == "npu" and hardware.is_captured(q.device),
        device=device,
        soc=hardware.soc(q.device) or AttentionSpec.soc,
        operators=_operators() if device == "npu" else (),
    )


def whole_blocks(cache) -> bool:
    """Return whether a cache is contiguous, with heads first or rows first in a block."""
    return cache.is_contiguous() or cache.transpose(1, 2).is_contiguous()


def _on_host(extra: Extra, packed: bool, keys: str) -> bool:
    needed = [extra.cu_seqlens_q_cpu] if packed else []
    needed += [extra.cu_seqlens_k_cpu] if keys == "packed" else []
    needed += [extra.seqlens_k_cpu] if keys in ("padded", "paged") else []
    return bool(needed) and all(x is not None for x in needed)


@functools.cache
def _operators() -> tuple[str, ...]:
    """Return torch_npu's attention operators that have all arguments that aclnn.py passes."""
    found = ((name, getattr(torch.ops.npu, name, None)) for name in _NEEDED)
    schemas = {name: op.default._schema for name, op in found if op is not None}
    return tuple(
        name
        for name, schema in schemas.items()
        if any(argument.name == _NEEDED[name] for argument in schema.arguments)
    )
