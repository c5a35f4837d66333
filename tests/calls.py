"""A right and small call of every public function, and of each that writes to its arguments.

For what must hold for all of them. A function that lacks one fails `test_every_function.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

import npu_ops


def bias_dropout_add(draw):
    return {
        "x": draw(6, 8), "bias": draw(8), "residual": draw(6, 8), "p": 0.5, "training": True,
    }  # fmt: skip


def rope(draw):
    return {
        "q": draw(2, 5, 4, 8), "k": draw(2, 5, 3, 8), "cos": draw(2, 5, 8), "sin": draw(2, 5, 8),
        "layout": "BSND",
    }  # fmt: skip


def rope_gather(draw):
    return rope(draw) | {
        "cos": draw(20, 8), "sin": draw(20, 8), "position_ids": torch.tensor([[3, 1, 4, 15, 9]]),
    }  # fmt: skip


def rope_packed(draw):
    return {
        "q": draw(10, 4, 8), "k": draw(10, 3, 8), "cos": draw(7, 8), "sin": draw(7, 8),
        "cu_seqlens": torch.tensor([0, 3, 10]),
    }  # fmt: skip


def freqs(draw):
    return {"q": draw(5, 2, 4, 8), "k": draw(5, 2, 3, 8), "freqs": draw(5, 2, 1, 8)}


def mrope(draw):
    return rope(draw) | {
        "cos": draw(3, 2, 5, 8), "sin": draw(3, 2, 5, 8), "mrope_section": [2, 1, 1],
        "section_layout": "interleaved",
    }  # fmt: skip


def cached(draw):
    return {
        "positions": torch.tensor([[3, 1, 4, 15, 9], [2, 6, 5, 3, 5], [8, 9, 7, 9, 3]]),
        "q": draw(5, 4, 8), "k": draw(5, 3, 8), "cos_sin_cache": draw(20, 8),
        "mrope_section": [2, 1, 1], "section_layout": "chunked",
    }  # fmt: skip


def attention(draw):
    return {
        "q": draw(2, 5, 4, 8), "k": draw(2, 7, 2, 8), "v": draw(2, 7, 2, 8), "sinks": draw(4),
        "bias": draw(5, 7), "return_lse": True,
    }  # fmt: skip


def attention_packed(draw):
    return {
        "q": draw(10, 4, 8), "k": draw(10, 2, 8), "v": draw(10, 2, 8), "layout": "TND",
        "cu_seqlens_q": torch.tensor([0, 3, 10]), "is_causal": True,
    }  # fmt: skip


def attention_paged(draw):
    return {
        "q": draw(2, 1, 4, 8), "k": draw(6, 16, 2, 8), "v": draw(6, 16, 2, 8),
        "block_table": torch.tensor([[2, 5], [1, 0]], dtype=torch.int32),
        "seqlens_k": torch.tensor([20, 7]),
    }  # fmt: skip


def l2norm(draw):
    return {"x": draw(3, 8)}


def gdn_gate(draw):
    return {"a": draw(3, 4), "A_log": draw(4), "dt_bias": draw(4), "b": draw(3, 4)}


def rms_norm_gated(draw):
    return {"x": draw(3, 8), "weight": draw(8), "z": draw(3, 8)}


def causal_conv1d(draw):
    return {
        "x": draw(1, 9, 8), "weight": draw(8, 4), "bias": draw(8), "residual": draw(1, 9, 8),
        "initial_state": draw(2, 8, 4), "output_final_state": True, "activation": "silu",
        "cu_seqlens": torch.tensor([0, 4, 9]),
    }  # fmt: skip


def causal_conv1d_qkv(draw):
    return {
        "x": draw(2, 5, 48), "weight": draw(48, 4), "bias": draw(48), "num_k_heads": 2,
        "num_v_heads": 2, "head_k_dim": 8, "head_v_dim": 8, "initial_state": draw(2, 48, 4),
        "output_final_state": True,
    }  # fmt: skip


def causal_conv1d_update(draw):
    return {
        "x": draw(2, 8), "conv_state": draw(4, 8, 3), "weight": draw(8, 4), "bias": draw(8),
        "conv_state_indices": torch.tensor([2, 1]), "intermediate_conv_window": draw(2, 1, 8, 3),
    }  # fmt: skip


def chunk_gated_delta_rule(draw):
    return {
        "q": draw(1, 20, 2, 16), "k": draw(1, 20, 2, 16), "v": draw(1, 20, 4, 16),
        "g": -draw(1, 20, 4).abs(), "beta": draw(1, 20, 4).sigmoid(),
        "initial_state": draw(2, 4, 16, 16), "output_final_state": True,
        "use_qk_l2norm_in_kernel": True, "cu_seqlens": torch.tensor([0, 3, 20]), "chunk_size": 16,
    }  # fmt: skip


def fused_recurrent_gated_delta_rule(draw):
    return {
        "q": draw(2, 5, 2, 8), "k": draw(2, 5, 2, 8), "v": draw(2, 5, 4, 8),
        "g": -draw(2, 5, 4).abs(), "beta": draw(2, 5, 4).sigmoid(),
        "initial_state": draw(2, 4, 8, 8), "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip


def gated_delta_rule_update(draw):
    return {
        "qkv": draw(2, 64), "a": draw(2, 4), "b": draw(2, 4), "A_log": draw(4), "dt_bias": draw(4),
        "state": draw(5, 4, 8, 8), "state_indices": torch.tensor([3, 1]), "state_v_first": True,
        "intermediate_states": draw(2, 1, 4, 8, 8),
    }  # fmt: skip


FUNCTIONS: dict[Callable, Callable] = {
    bias_dropout_add: npu_ops.bias_dropout_add,
    rope: npu_ops.apply_rotary_pos_emb,
    rope_gather: npu_ops.apply_rotary_pos_emb,
    rope_packed: npu_ops.apply_rotary_pos_emb,
    freqs: npu_ops.apply_rotary_pos_emb_freqs,
    mrope: npu_ops.apply_multimodal_rotary_pos_emb,
    cached: npu_ops.apply_multimodal_rotary_pos_emb_cached,
    attention: npu_ops.attention,
    attention_packed: npu_ops.attention,
    attention_paged: npu_ops.attention,
    l2norm: npu_ops.l2norm,
    gdn_gate: npu_ops.gdn_gate,
    rms_norm_gated: npu_ops.rms_norm_gated,
    causal_conv1d: npu_ops.causal_conv1d,
    causal_conv1d_qkv: npu_ops.causal_conv1d_qkv,
    causal_conv1d_update: npu_ops.causal_conv1d_update,
    chunk_gated_delta_rule: npu_ops.chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule: npu_ops.fused_recurrent_gated_delta_rule,
    gated_delta_rule_update: npu_ops.gated_delta_rule_update,
}

# The calls that write to arguments, and to which.
IN_PLACE = {
    bias_dropout_add: ("x",), rope: ("q", "k"), rope_gather: ("q", "k"), rope_packed: ("q", "k"),
    freqs: ("q", "k"), mrope: ("q", "k"), cached: ("q", "k"),
    causal_conv1d_update: ("conv_state", "intermediate_conv_window"),
    gated_delta_rule_update: ("state", "intermediate_states"),
}  # fmt: skip


def arguments(call: Callable, in_place: bool = False, **changes) -> dict:
    """The arguments of a call, in fp32, the same each time."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    inplace = {"inplace": True} if in_place and "_update" not in call.__name__ else {}
    return call(draw) | inplace | changes


def tensors(call: Callable) -> list[str]:
    """The names of a call's tensors."""
    return [n for n, value in arguments(call).items() if isinstance(value, torch.Tensor)]
