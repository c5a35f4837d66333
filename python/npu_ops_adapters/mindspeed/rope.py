"""Replaces MindSpeed's rope dispatcher by one with all arguments, and allows fused mrope.

MindSpeed replaces Megatron's dispatcher, `apply_rotary_pos_emb`, by an earlier version of that
function. The earlier one lacks `mla_rotary_interleaved`, `inverse` and `max_seqlen`, and in some
versions drops `cp_group`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterable

import torch

from npu_ops_adapters.megatron import rope
from npu_ops_adapters.mindspeed import VERSIONS
from npu_ops_adapters.patching import Patch

_HEAD = ("t", "freqs", "config", "cu_seqlens", "mscale")
_DISPATCHERS = (
    _HEAD,
    (*_HEAD, "cp_group"),
    (*_HEAD, "cp_group", "mla_rotary_interleaved"),
    (
        *(*_HEAD, "cp_group", "mla_rotary_interleaved", "inverse"),
        *("mla_output_remove_interleaving", "max_seqlen"),
    ),
)


def patches() -> Iterable[Patch]:
    """Patch the check that allows --use-fused-rotary-pos-emb only for plain rope."""
    yield Patch(
        target="mindspeed.features_manager.fusions.fused_rope:FusedRoPEFeature.validate_args",
        op="mrope",
        make=_replace_validate,
        why="MindSpeed's kernel takes only plain rope; npu-ops' kernel also takes multimodal freqs",
        signatures=(("self", "args"),),
        versions=VERSIONS,
        remove_when="MindSpeed's fused rope takes multimodal freqs",
    )


def dispatcher() -> Patch:
    """Patch `apply_rotary_pos_emb`. Only needed with MindSpeed, which replaces it."""
    return Patch(
        target=f"{rope.MODULE}:apply_rotary_pos_emb",
        op="rope",
        make=_replace_dispatcher,
        why="MindSpeed's function lacks arguments that later Megatron-Core versions pass",
        signatures=_DISPATCHERS,
        versions=f"{VERSIONS}, Megatron-Core 0.12 to 0.19 and main",
        remove_when="MindSpeed's function has the parameters of its Megatron-Core's",
    )


def scaled(patch: Patch) -> Patch:
    """Return the patch, changed so that calls with YaRN run MindSpeed's function.

    Only the patch of `_apply_rotary_pos_emb_bshd` is changed. With YaRN, MindSpeed's function takes
    the scale from MindSpeed's settings and ignores the caller's mscale.
    """
    if patch.attribute != "_apply_rotary_pos_emb_bshd":
        return patch

    def make(original: Callable) -> Callable:
        ours, theirs = patch.make(original), rope.tolerant(original)

        @functools.wraps(original, assigned=(), updated=())
        def npu_ops_rope(*args, **kwargs):
            return (theirs if _is_yarn() else ours)(*args, **kwargs)

        return npu_ops_rope

    return dataclasses.replace(patch, make=make)


def _is_yarn() -> bool:
    args = sys.modules["mindspeed.args_utils"].get_full_args()
    return getattr(args, "rope_scaling_type", None) == "yarn"


def _replace_validate(original: Callable) -> Callable:
    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_validate(self, args):
        if not getattr(args, "use_fused_rotary_pos_emb", False):
            return None
        position = getattr(args, "position_embedding_type", "rope")
        if position != "mrope":
            return original(self, args)
        args.position_embedding_type = "rope"
        try:
            return original(self, args)
        finally:
            args.position_embedding_type = position

    return npu_ops_validate


def _replace_dispatcher(original: Callable) -> Callable:
    known = inspect.signature(original).parameters

    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_apply_rotary_pos_emb(
        t,
        freqs,
        config,
        cu_seqlens=None,
        mscale=1.0,
        cp_group=None,
        mla_rotary_interleaved=None,
        inverse=False,
        mla_output_remove_interleaving=False,
        max_seqlen=None,
    ):
        given = {
            "cp_group": cp_group,
            "mla_rotary_interleaved": mla_rotary_interleaved,
            "inverse": inverse or None,
            "mla_output_remove_interleaving": mla_output_remove_interleaving or None,
            "max_seqlen": max_seqlen,
        }
        given = {name: value for name, value in given.items() if value is not None}
        # cu_seqlens may also be None, or an object of MindSpeed's reset_attention_mask.
        packed = isinstance(cu_seqlens, torch.Tensor)
        if not packed and given.keys() <= known.keys():
            return original(t, freqs, config, cu_seqlens, mscale, **given)
        given.setdefault("mla_rotary_interleaved", getattr(config, "multi_latent_attention", False))
        given |= {"rotary_interleaved": config.rotary_interleaved, "mscale": mscale}
        return _unfused(t, freqs, cu_seqlens, **given)

    return npu_ops_apply_rotary_pos_emb


def _unfused(t, freqs, cu_seqlens, cp_group=None, max_seqlen=None, **options):
    """Call the functions that MindSpeed's dispatcher calls without apex; npu-ops wraps them."""
    module = sys.modules[rope.MODULE]
    if cu_seqlens is None:
        return module._apply_rotary_pos_emb_bshd(t, freqs, **options)
    if cp_group is None:
        state = sys.modules["megatron.core.parallel_state"]
        cp_group = state.get_context_parallel_group(check_initialized=False)
    options |= {"cp_group": cp_group, "max_seqlen": max_seqlen}
    return module._apply_rotary_pos_emb_thd(t, cu_seqlens, freqs, **options)
