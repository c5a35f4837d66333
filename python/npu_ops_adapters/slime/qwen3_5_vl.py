"""Fixes slime's Qwen3.5 with pictures: mrope with MindSpeed, and sequences of odd length."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

from npu_ops_adapters.patching import Patch

_VERSIONS = "slime 624b824a"
_MODEL = "slime_plugins.models.qwen3_5_vl"


def patches() -> Iterable[Patch]:
    """Patch the model's constructor, and the function that returns the token indices of a rank."""
    yield Patch(
        target=f"{_MODEL}:Qwen3_5VLModel.__init__",
        op="slime_qwen3_5_vl",
        make=_with_mrope,
        why="slime's script sets rope; MindSpeed passes that to Megatron-LM, not slime's mrope",
        signatures=(
            (
                *("self", "config", "language_layer_spec", "hf_config", "args", "pre_process"),
                *("post_process", "vp_stage"),
            ),
        ),
        versions=f"{_VERSIONS} with MindSpeed core_r0.16.0",
        remove_when="slime's script for Qwen3.5 with pictures sets mrope",
    )
    yield Patch(
        target=f"{_MODEL}_utils:get_packed_cp_local_indices",
        op="slime_qwen3_5_vl",
        make=_whole,
        why="it rejects sequences of odd length even without context parallelism",
        signatures=(("cu_seqlens", "cp_size", "cp_rank", "device"),),
        versions=_VERSIONS,
        remove_when="slime takes sequences of odd length without context parallelism",
    )


def _with_mrope(original: Callable) -> Callable:
    @functools.wraps(original)
    def npu_ops_model(self, config, *args, **kwargs):
        if hasattr(config, "position_embedding_type"):  # Megatron-LM reads the config's value first
            config.position_embedding_type = "mrope"
        original(self, config, *args, **kwargs)

    return npu_ops_model


def _whole(original: Callable) -> Callable:
    @functools.wraps(original)
    def npu_ops_indices(cu_seqlens, cp_size, cp_rank, device):
        if cp_size > 1:
            return original(cu_seqlens, cp_size, cp_rank, device)
        return torch.arange(int(cu_seqlens[-1]), dtype=torch.long, device=device)

    return npu_ops_indices
