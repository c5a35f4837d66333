"""The attention layer; it imports the rope function by value."""

from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.rope import (  # noqa: F401
    apply_rotary_pos_emb_absolute,
)
