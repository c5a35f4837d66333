"""Megatron-Bridge's Qwen3-VL, for slime's --custom-model-provider-path and its --spec.

`provide` is for CPUs, in Megatron's own layers: Bridge's AutoBridge wants Transformer Engine or
MindSpeed. `bridges` is for NPUs, where slime does not ask AutoBridge itself.
"""

from __future__ import annotations

import importlib

import slime_worker
import transformers

FROM_ARGUMENTS = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "sequence_parallel"),
    "gradient_accumulation_fusion",
)
MODELLING = "megatron.bridge.models.qwen_vl.modelling_qwen3_vl"


def on_cpu(args, config, vp_stage):
    """For --spec."""
    return provide


def bridges(args, config, vp_stage):
    """For --spec: Bridge's own provider, as slime v0.3.0 asks for it."""
    slime_worker.without_marks()
    from megatron.bridge import AutoBridge
    from megatron.core.process_groups_config import ProcessGroupCollection

    bridge = AutoBridge.from_hf_pretrained(args.hf_checkpoint)
    provider = bridge.to_megatron_provider(load_weights=False)
    for name in FROM_ARGUMENTS:
        setattr(provider, name, getattr(args, name))
    provider.finalize()
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    return provider.provide


def provide(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None):
    """The model of slime's arguments, with transformers' own vision tower."""
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
    """Megatron's configuration, with what Bridge's has more."""
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
