"""Replaces multimodal rotary embedding: freqs `[s, b, 1, r]`, which differ between samples.

Megatron's `MultimodalRotaryEmbedding` makes such freqs. Transformer Engine does not support them.
So Megatron passes them to the unfused function even with apply_rope_fusion=True, and warns. Ignore
the warning: this replacement is fused. Freqs for a batch of one look like plain freqs, so rope.py
handles them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from npu_ops_adapters.megatron import rope
from npu_ops_adapters.patching import Patch


def patches() -> Iterable[Patch]:
    """Patch the function of the unfused path, which the fused path calls too."""
    yield Patch(
        target=f"{rope.MODULE}:_apply_rotary_pos_emb_bshd",
        op="mrope",
        make=_replace,
        why="no fused kernel takes multimodal freqs with a batch of more than one",
        signatures=rope.SBND_SIGNATURES,
        versions=rope.VERSIONS,
        remove_when="Megatron-Core calls an operator here that has an NPU kernel",
    )


def _replace(original: Callable) -> Callable:
    return rope.replace_sbnd(original, has_batch=True)
