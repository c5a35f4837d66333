"""Megatron-Bridge's Qwen3-VL: rope of freqs for each token, past Megatron's dispatcher.

From 0.4 on it calls the unfused function by itself, and converts to fp32 and back around it where
`apply_rotary_pos_emb_in_fp32` says so. Ours computes in fp32 and rounds once.

Programs pass arguments that some versions do not have and do not need; slime carries shims for it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable

from npu_ops_adapters.megatron import rope
from npu_ops_adapters.patching import Patch

_MODELLING = "megatron.bridge.models.qwen_vl.modelling_qwen3_vl"
_OLDER = "Qwen3VLMoETextRotaryEmbedding"  # of 0.3, whose layers call Megatron's dispatcher
_NEEDLESS = {  # positions say all of a packing, and where no loss is computed a mask is not needed
    ("text_model", "Qwen3VLTextRotaryEmbedding"): "packed_seq_params",
    ("text_model", "Qwen3VLMoETextRotaryEmbedding"): "packed_seq_params",
    ("model", "Qwen3VLModel"): "loss_mask",
}


def patches() -> Iterable[Patch]:
    """`apply_rotary_pos_emb_absolute`, which layers import by value, and forwards that lack it."""
    if not hasattr(sys.modules.get(f"{_MODELLING}.rope"), _OLDER):
        yield absolute(f"{_MODELLING}.rope", "Megatron-Bridge 0.4 and main")

    for (module, name), argument in _NEEDLESS.items():
        module = f"{_MODELLING}.{module}"
        if module not in sys.modules or _lacks(vars(sys.modules[module]).get(name), argument):
            yield Patch(
                target=f"{module}:{name}.forward",
                op="mrope",
                make=functools.partial(_without, argument=argument),
                why=f"slime passes {argument}, which it does not have in all versions",
                signatures=(),  # whatever it has, it is passed on
                versions="Megatron-Bridge 0.3",
                remove_when=f"it has {argument}",
            )


def absolute(module: str, versions: str) -> Patch:
    """Of the function in `module`: MindSpeed-Bridge has a copy of it."""
    return Patch(
        target=f"{module}:apply_rotary_pos_emb_absolute",
        op="mrope",
        make=_replace,
        why="it asserts that nothing is fused; in fp32 it is eight kernels a call",
        signatures=(("t", "freqs", "config", "cu_seqlens"),),
        versions=versions,
        remove_when="it calls an operator that has an NPU kernel",
    )


def _lacks(owner: type | None, argument: str) -> bool:
    """Whether a class's own forward does not take it; other versions have not the class."""
    forward = vars(owner).get("forward") if owner else None
    if forward is None:
        return False
    parameters = inspect.signature(forward).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return argument not in parameters and not takes_all


def _without(original: Callable, argument: str) -> Callable:
    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_forward(self, *args, **kwargs):
        if kwargs.get("labels") is None:  # with labels there is a loss, and a mask belongs to it
            kwargs.pop(argument, None)
        return original(self, *args, **kwargs)

    return npu_ops_forward


def _replace(original: Callable) -> Callable:
    @functools.wraps(original, assigned=(), updated=())
    def npu_ops_rope(t, freqs, config, cu_seqlens=None):
        packed = cu_seqlens is not None
        out = None
        if not config.apply_rope_fusion:  # which the original says is wrong here
            rows = t[:, None] if packed else t
            out = rope.rotated(rows, freqs, bool(config.rotary_interleaved))
        if out is None:
            return original(t, freqs, config, cu_seqlens)
        return out.squeeze(1) if packed else out

    return npu_ops_rope
