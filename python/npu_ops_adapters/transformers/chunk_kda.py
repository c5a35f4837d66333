"""Replaces Kimi Delta Attention by chunks: training and prefill."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import npu_ops
from npu_ops.core import check
from npu_ops.core.signature import call_of
from npu_ops.ops.chunk_kda.arguments import CHUNK_SIZES, check_call
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.transformers import models
from npu_ops_adapters.transformers.chunk_gated_delta_rule import (
    check_whole,
    checked_by,
    delta_rule_arguments,
)
from npu_ops_adapters.transformers.equivalence import Variant

_Call = call_of(npu_ops.chunk_kda)
_HEAD = ("query", "key", "value", "g", "beta", "chunk_size")
_STATE = ("initial_state", "output_final_state", "use_qk_l2norm_in_kernel")


def patches() -> Iterable[Patch]:
    """Patch `chunk_kimi_delta_attention`, which calls fla's function if fla is installed."""
    yield from models.compared(
        models.linear(),
        models.RULE_BY_CHANNEL,
        "chunk_kda",
        (Variant(ours, _calls),),
        (*_HEAD, *_STATE, "kwargs"),
    )


def _calls(function) -> list[tuple]:
    """Return small calls with two chunks, of which the second is not full."""
    tiny, plain, state = delta_rule_arguments(tokens=19, by_channel=True)
    return [(*tiny, 16, state, True, True), (*plain, 16)]


def ours(
    query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, cu_seqlens=None, **unread,
) -> Callable:  # fmt: skip
    """Return the npu-ops call for this call of transformers. Arguments in `unread` are ignored.

    Raises:
        RuntimeError: verl's Ulysses has split the sequence over ranks. Each rank would start with
            a new state.
    """
    check_whole("verl supports no Kimi Delta Attention over several ranks")
    check.one_of("chunk_size", chunk_size, CHUNK_SIZES)
    arguments = checked_by(
        _Call, check_call, q=query, k=key, v=value, g=g, beta=beta, initial_state=initial_state,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens, chunk_size=chunk_size,
    )  # fmt: skip
    return functools.partial(npu_ops.chunk_kda, **arguments)
