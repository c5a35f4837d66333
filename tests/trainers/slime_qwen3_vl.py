"""Build Megatron-Bridge's Qwen3-VL on CPUs, for slime's --custom-model-provider-path and --spec.

It uses Megatron's own layers: Bridge's AutoBridge needs Transformer Engine or MindSpeed.
"""

from __future__ import annotations

import importlib

import transformers

MODELLING = "megatron.bridge.models.qwen_vl.modelling_qwen3_vl"


def on_cpu(args, config, vp_stage):
    """For --spec: return the function that builds the model."""
    return provide


def provide(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None):
    """Build the model for slime's arguments, with transformers' own vision tower."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import get_args

    args = get_args()
    theirs = transformers.AutoConfig.from_pretrained(args.hf_checkpoint)
    return importlib.import_module(f"{MODELLING}.model").Qwen3VLModel(
        language_transformer_config=configured(args, theirs),
        language_transformer_layer_spec=gpt_layer_specs.get_gpt_layer_local_spec(
            normalization="RMSNorm", qk_layernorm=True
        ),
        vision_transformer_config=theirs.vision_config,
        pre_process=pre_process,
        post_process=post_process,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )


def configured(args, theirs):
    """Return Megatron's configuration with the additional fields of Bridge's."""
    from megatron.training.arguments import core_transformer_config_from_args

    config = core_transformer_config_from_args(args)
    config.vocab_size = args.padded_vocab_size
    config.language_max_sequence_length = args.seq_length
    config.rotary_base, config.rotary_percent = args.rotary_base, args.rotary_percent
    config.fp16_lm_cross_entropy = config.share_embeddings_and_output_weights = False
    config.hf_text_config = theirs.text_config
    config.mrope_section = theirs.text_config.rope_scaling["mrope_section"]
    config.spatial_merge_size = theirs.vision_config.spatial_merge_size
    for name in ("image_token_id", "video_token_id", "vision_start_token_id"):
        setattr(config, name, getattr(theirs, name))
    return config
