"""Fuses split, q and k norms and rotation of Qwen3's attention, where SGLang runs them separately.

SGLang runs them separately on CPUs. On NPUs it does so for Qwen3 before 0.5.15, for Qwen3-Next, and
for Qwen3.5 without mrope sections, but not in decoding. `split_qkv_rmsnorm_rope` and
`split_gated_qkv` replace the fused kernels of sgl-kernel-npu.

For Qwen3.5's prompts SGLang passes 1 + weight, rounded to the model's dtype, to sgl-kernel-npu;
decoding and training do not round it. With NPU_OPS_CONSISTENT and SGLang 0.5.23 this file also
replaces the prompts' method, `forward_prepare_npu_prefill`.
"""

from __future__ import annotations

from collections.abc import Iterable

from npu_ops.core import env
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.serving_rotary import norm_and_rotate
from npu_ops_adapters.sglang import functions, rope

_NORMS = {"RMSNorm": False, "GemmaRMSNorm": True}  # whether the norm multiplies by 1 + weight


def patches() -> Iterable[Patch]:
    """Replace the methods that prepare q and k for attention."""
    methods = [
        ("qwen3:Qwen3Attention.forward_prepare_native", ours),
        ("qwen3_moe:Qwen3MoeAttention.apply_qk_norm_rope", ours_of_experts),
    ]
    if functions.since("0.5.15"):  # before, this code was in the middle of a longer method
        methods += [
            ("qwen3_next:Qwen3HybridAttentionDecoderLayer.forward_prepare_native", ours_gated),
            ("qwen3_5:Qwen3_5AttentionDecoderLayer.forward_prepare_native", ours_gated_by_heads),
        ]
    if functions.on_npu() and functions.since("0.5.23") and env.settings.consistent:
        methods += [
            ("qwen3_5:Qwen3_5AttentionDecoderLayer.forward_prepare_npu_prefill", ours_gated)
        ]
    why = "it launches two norms and a rotation; each reads, rounds and writes q and k"
    for method, function in methods:
        target = f"sglang.srt.models.{method}"
        yield functions.replaced(target, "qk_norm_rope", function, why)


def ours(self, positions, hidden_states):
    """Return q, k and v, `[T, heads * D]`; v is a view of the projection."""
    check(self, hidden_states)
    qkv, _ = self.qkv_proj(hidden_states)
    q, k, v, _ = prepared(self, positions, qkv)
    return q, k, v


def ours_of_experts(self, qkv, positions, forward_batch):
    """Return what `ours` returns, from qkv `[T, W]`, the projection's output."""
    if getattr(self, "use_fused_qk_norm_rope_cpu", False):
        raise functions.NotOursError("SGLang is set to use its own CPU kernel")
    check(self, qkv)
    q, k, v, _ = prepared(self, positions, qkv)
    # SGLang reads this attribute to decide which code saves k and v.
    self._used_fused_qk_norm_rope_last_call = False
    return q, k, v


def ours_gated(self, positions, hidden_states):
    """Return what `ours` returns, and the gate, `[T, N * D]` or None."""
    q, k, v, gate = ours_gated_by_heads(self, positions, hidden_states)
    return q, k, v, gate if gate is None else gate.flatten(1)


def ours_gated_by_heads(self, positions, hidden_states):
    """Return what `ours_gated` returns, but the gate as `[T, N, D]`, a view of the projection.

    Qwen3.5 uses this form.
    """
    check(self, hidden_states)
    qkv, _ = self.qkv_proj(hidden_states)
    return prepared(self, positions, qkv, gated=bool(self.attn_output_gate))


def check(attention, x) -> None:
    """Raise ValueError unless npu-ops supports this layer. Runs before anything is computed."""
    embedding = attention.rotary_emb
    of_axes = getattr(embedding, "mrope_section", None)
    rope.check_plain(embedding, x, "MRotaryEmbedding" if of_axes else "RotaryEmbedding")
    functions.refuse(mrope_interleaved_glm=getattr(embedding, "mrope_interleaved_glm", False))
    norms = attention.q_norm, attention.k_norm
    kinds = {type(norm).__name__ for norm in norms}
    if len(kinds) > 1 or not kinds <= _NORMS.keys():
        raise ValueError(f"norms: got {', '.join(sorted(kinds))}, needs one of {', '.join(_NORMS)}")
    if len({norm.variance_epsilon for norm in norms}) > 1:
        raise ValueError("norms: got two epsilons, needs one")
    for norm in norms:
        functions.refuse(
            bias=getattr(norm, "bias", None),
            cast_x_before_out_mul=getattr(norm, "cast_x_before_out_mul", False),
            override_orig_dtype=getattr(norm, "override_orig_dtype", None),
            variance_size_override=getattr(norm, "variance_size_override", None),
        )


def prepared(attention, positions, qkv, gated: bool = False):
    """Return q, k and v with their heads flattened, and the gate."""
    zero_centered = _NORMS[type(attention.q_norm).__name__]
    return norm_and_rotate(
        attention, positions, qkv, zero_centered=zero_centered, gated=gated, copy_rest=False
    )
