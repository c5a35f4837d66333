"""A module that imports the rope function's name, so a patch must replace the name here, too."""

from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.rope import (  # noqa: F401
    apply_rotary_pos_emb_absolute,
)
