"""Replaces Qwen3-VL's rope in Megatron-Bridge: freqs per token, bypassing Megatron's dispatcher.

From 0.4 on, Bridge calls the unfused function itself, and converts to fp32 and back if
`apply_rotary_pos_emb_in_fp32` is set. npu-ops computes in fp32 and rounds once.

Trainers also pass arguments that some versions of Bridge lack, and do not need. The patches drop
them; slime ships patches of its own for this.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable

from npu_ops_adapters.megatron import rope
from npu_ops_adapters.patching import Patch

_MODELLING = "megatron.bridge.models.qwen_vl.modelling_qwen3_vl"
_OLDER = "Qwen3VLMoETextRotaryEmbedding"  # a class of 0.3, whose layers call Megatron's dispatcher
# Arguments that the model does not need: positions already describe the packing, and without a loss
# no loss mask is needed.
_NEEDLESS = {
    ("text_model", "Qwen3VLTextRotaryEmbedding"): "packed_seq_params",
    ("text_model", "Qwen3VLMoETextRotaryEmbedding"): "packed_seq_params",
    ("model", "Qwen3VLModel"): "loss_mask",
}


def patches() -> Iterable[Patch]:
    """Patch `apply_rotary_pos_emb_absolute`, and each `forward` that lacks an argument."""
    if not hasattr(sys.modules.get(f"{_MODELLING}.rope"), _OLDER):
        yield absolute(f"{_MODELLING}.rope", "Megatron-Bridge 0.4 and main")

    for (module, name), argument in _NEEDLESS.items():
        module = f"{_MODELLING}.{module}"
        if module not in sys.modules or _lacks(vars(sys.modules[module]).get(name), argument):
            yield Patch(
                target=f"{module}:{name}.forward",
                op="mrope",
                make=functools.partial(_without, argument=argument),
                why=f"slime passes {argument}, which not all versions of this function have",
                signatures=(),  # not checked: all other arguments are passed on
                versions="Megatron-Bridge 0.3",
                remove_when=f"this function has {argument}",
            )


def absolute(module: str, versions: str) -> Patch:
    """Patch the function in `module`. MindSpeed-Bridge has a copy of it."""
    return Patch(
        target=f"{module}:apply_rotary_pos_emb_absolute",
        op="mrope",
        make=_replace,
        why="it asserts that nothing is fused; in fp32 it launches eight kernels per call",
        signatures=(("t", "freqs", "config", "cu_seqlens"),),
        versions=versions,
        remove_when="this function calls an operator that has an NPU kernel",
    )


def _lacks(owner: type | None, argument: str) -> bool:
    """Return whether a class's own `forward` lacks the argument. False without such a class."""
    forward = vars(owner).get("forward") if owner else None
    if forward is None:
        return False
    parameters = inspect.signature(forward).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return argument not in parameters and not takes_all


def _without(original: Callable, argument: str) -> Callable:
    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_forward(self, *args, **kwargs):
        if kwargs.get("labels") is None:  # labels mean a loss, which needs the mask
            kwargs.pop(argument, None)
        return original(self, *args, **kwargs)

    return npu_ops_forward


def _replace(original: Callable) -> Callable:
    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_rope(t, freqs, config, cu_seqlens=None):
        packed = cu_seqlens is not None
        out = None
        if not config.apply_rope_fusion:  # with fusion, the original raises an error
            rows = t[:, None] if packed else t
            out = rope.rotated(rows, freqs, bool(config.rotary_interleaved))
        if out is None:
            return original(t, freqs, config, cu_seqlens)
        return out.squeeze(1) if packed else out

    return npu_ops_rope
