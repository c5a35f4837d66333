"""Stand-ins for SGLang's attention layers, with the attributes that their methods read."""

import importlib
import pkgutil
import types

import torch

MODELS = "sglang.srt.models"
LAYERS = {  # layer: (its norm, whether queries have gates)
    "qwen3.Qwen3Attention": ("RMSNorm", False),
    "qwen3_next.Qwen3HybridAttentionDecoderLayer": ("GemmaRMSNorm", True),
    "qwen3_5.Qwen3_5AttentionDecoderLayer": ("GemmaRMSNorm", True),
}


def attention(layer, norm, gated, rotary):
    """Return a layer's attributes: 4 query and 2 key heads of 64; its input is the projection."""
    norms = [
        getattr(importlib.import_module("sglang.srt.layers.layernorm"), norm)(64) for _ in "qk"
    ]
    for top, module in enumerate(norms):
        module.weight.data.copy_(torch.linspace(0.5, 1.5 + top, 64))
    made = types.SimpleNamespace(
        qkv_proj=lambda x: (x.clone(), None), q_norm=norms[0], k_norm=norms[1], head_dim=64,
        q_size=256, kv_size=128, num_heads=4, num_kv_heads=2, alt_stream=None, rotary_emb=rotary,
        attn_output_gate=gated, use_fused_qk_norm_rope=False, use_fused_qk_norm_rope_cpu=False,
        compatible_with_fused_kv_buffer=False,
    )  # fmt: skip
    if gated:
        method = pkgutil.resolve_name(f"{MODELS}.{layer}._apply_qk_norm")
        made._apply_qk_norm = types.MethodType(method, made)
    return made
