"""Fixes two bugs in the Qwen3-Next layers of slime up to v0.2.2. Both are silent, on GPUs too.

1. The delta rule does not get `cu_seqlens`: the state of a packed sequence passes into the next.
   slime fixed this in v0.2.3 (#1686).
2. With sequence parallelism, gradients are summed over ranks although each rank already has the
   full gradient. They are too large by the number of ranks. slime fixed this in v0.2.4 (#1748).

npu-ops detects both in slime's source, and logs each once.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterable
from typing import Any

from npu_ops.core import log
from npu_ops_adapters.patching import Patch

_LAYERS = "slime_plugins.models.qwen3_next"
_AROUND = "slime_plugins.models.hf_attention"
_GATHER = "gather_from_sequence_parallel_region"
_ALONE = "tensor_parallel_output_grad"  # argument of _GATHER; False: ranks have whole gradients

_now = threading.local()  # .lengths: cu_seqlens of the layer that this thread runs


def patches() -> Iterable[Patch]:
    """Patch the layer, its delta rule, and functions of Megatron-LM that the layer calls."""
    if not _mended(_LAYERS, "Qwen3NextGatedDeltaNet", "forward", "cu_seqlens=cu_seqlens", 2):
        layer = (("self", "hidden_states", "cu_seqlens"),)
        yield _patch(f"{_LAYERS}:Qwen3NextGatedDeltaNet.forward", _with_lengths, layer)
        yield _patch(f"{_LAYERS}:chunk_gated_delta_rule", _pass_lengths, ())
    if not _mended(_AROUND, "HuggingfaceAttention", "forward", _ALONE, 1):
        yield _patch(f"{_AROUND}:tensor_parallel", _gather_once, ())


def _mended(module: str, name: str, method: str, words: str, times: int) -> bool:
    """Return whether the source of slime's method has `words` at least `times` times.

    False if the module is not imported; True if the source is not available.
    """
    owner = getattr(sys.modules.get(module), name, None)
    try:
        source = inspect.getsource(inspect.unwrap(getattr(owner, method))) if owner else ""
    except (OSError, TypeError):
        return True
    return source.count(words) >= times


def _patch(target: str, make: Callable, signatures: tuple) -> Patch:
    return Patch(
        target=target,
        op="slime_qwen3_next",
        make=make,
        why="slime computes wrong values in this function, without a warning",
        signatures=signatures,
        versions="slime v0.2.2",
        remove_when="slime v0.2.2 is not used",
        rebind=False,
    )


def _with_lengths(original: Callable) -> Callable:
    @functools.wraps(original)
    def npu_ops_forward(self, hidden_states, cu_seqlens=None):
        _now.lengths = cu_seqlens
        try:
            return original(self, hidden_states, cu_seqlens)
        finally:
            _now.lengths = None

    return npu_ops_forward


def _pass_lengths(original: Callable) -> Callable:
    @functools.wraps(original)
    def npu_ops_rule(*args, **kwargs):
        lengths = getattr(_now, "lengths", None)
        if lengths is not None and kwargs.get("cu_seqlens") is None:
            _say("carries states from one packed sequence into the next", "#1686")
            kwargs["cu_seqlens"] = lengths
        return original(*args, **kwargs)

    return npu_ops_rule


def _gather_once(original: Any) -> Any:
    gather = getattr(original, _GATHER)

    @functools.wraps(gather)
    def npu_ops_gather(*args, **kwargs):
        _say("adds gradients of Qwen3-Next's layers once per rank", "#1748")
        return gather(*args, **{_ALONE: False} | kwargs)

    return types.SimpleNamespace(**vars(original) | {_GATHER: npu_ops_gather})


def _say(mistake: str, mended_by: str) -> None:
    log.once(
        f"slime {mistake}: npu-ops applies the fix of slime's {mended_by};"
        " NPU_OPS_DISABLE=slime_qwen3_next turns this off"
    )
