"""Replaces attention in layers that still hold DotProductAttention, a class MindSpeed patches.

Layers that are built with npu-ops have `megatron.attention`'s module and never call this class.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable

from npu_ops_adapters.megatron import attention
from npu_ops_adapters.mindspeed import VERSIONS
from npu_ops_adapters.patching import Patch

_MODULE = "mindspeed.te.pytorch.attention.dot_product_attention.dot_product_attention"
_CALL = ("self", "query", "key", "value", "attention_mask", "attn_mask_type", "attention_bias")
# Fields of PackedSeqParams that only repeat information of cu_seqlens.
_COUNTS = ("total_tokens", "seq_idx", "tokens_per_sample")


def patches() -> Iterable[Patch]:
    """Patch MindSpeed's Transformer Engine attention, which gets all fields of PackedSeqParams."""
    yield Patch(
        target=f"{_MODULE}:DotProductAttention.forward",
        op="attention",
        make=_replace_engine,
        why="later Megatron-Core versions have fields that it does not accept",
        signatures=(),  # not checked: its thirty parameters are passed on
        versions=VERSIONS,
        remove_when="MindSpeed accepts all fields of its Megatron-Core's PackedSeqParams",
    )


def forward() -> Patch:
    """Patch `DotProductAttention.forward`, which MindSpeed replaces and wraps."""
    return Patch(
        target="megatron.core.transformer.dot_product_attention:DotProductAttention.forward",
        op="attention",
        make=_replace_forward,
        why="MindSpeed's function takes lengths from the host in each layer, and no bias",
        signatures=((*_CALL, "packed_seq_params"),),
        versions=f"{VERSIONS}, Megatron-Core 0.12 to 0.19 and main",
        remove_when="MindSpeed's function supports all calls of npu_ops.attention",
    )


def _replace_forward(original: Callable) -> Callable:
    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_attention(
        self,
        query,
        key,
        value,
        attention_mask,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
    ):
        call = (query, key, value, attention_mask, attn_mask_type, attention_bias)
        if attention.why_not(self.config) is None and _is_ours(self.config, key):
            scale = self.softmax_scale * (self.scale_mask_softmax.scale or 1.0)
            out = attention.attend(self, *call, packed_seq_params, by_type=False, scale=scale)
            if out is not None:
                return out
        # positional, as MindSpeed's wrappers pass it
        return original(self, *call, packed_seq_params)

    return npu_ops_attention


def _is_ours(config, key) -> bool:
    """Return whether MindSpeed's own settings leave the mask unchanged."""
    whole = getattr(config, "pre_tockens", key.shape[0]) >= key.shape[0]
    modes = getattr(config, "sparse_mode", 0) in (0, 2)
    return whole and modes and not getattr(config, "is_llava", False)


def _replace_engine(original: Callable) -> Callable:
    names = inspect.signature(original).parameters

    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_forward(self, *args, **kwargs):
        known = {
            name: value
            for name, value in kwargs.items()
            if name in names or (value is not None and name not in _COUNTS)
        }
        return original(self, *args, **known)

    return npu_ops_forward
