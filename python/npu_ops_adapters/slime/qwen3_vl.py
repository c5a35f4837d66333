"""Builds Qwen3-VL with Megatron-Bridge, for slime newer than v0.2.2.

slime takes such a model by an option: `--spec npu_ops_adapters.slime.qwen3_vl model_provider`.
"""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from npu_ops_adapters.slime.provider import ASKED

# Settings that Bridge's provider does not find in Hugging Face's configuration.
_NAMES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    *ASKED,
)


def model_provider(args: Namespace, config: Any, vp_stage: int | None) -> Callable:
    """Return the function that builds the model of `--hf-checkpoint`, for slime's --spec.

    Args:
        args: slime's arguments.
        config: Megatron-LM's configuration; ignored, because Bridge has its own.
        vp_stage: ignored; slime passes it to the returned function again.
    """
    bridge = importlib.import_module("megatron.bridge").AutoBridge
    found = bridge.from_hf_pretrained(args.hf_checkpoint, trust_remote_code=True)
    provider = found.to_megatron_provider(load_weights=False)
    for name in _NAMES:
        setattr(provider, name, getattr(args, name))
    provider.finalize()
    return provider.provide
