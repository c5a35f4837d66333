"""Replaces the gated delta rule by chunks: training and prefill, packed sequences too.

Without flash-linear-attention, transformers' own function rejects packed sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

import npu_ops
from npu_ops.core import check
from npu_ops.core.signature import call_of
from npu_ops.ops.chunk_gated_delta_rule.arguments import CHUNK_SIZES, check_call
from npu_ops_adapters.calls import check_device
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.transformers import models
from npu_ops_adapters.transformers.equivalence import Draw, Variant
from npu_ops_adapters.verl import ulysses

_HEAD = ("query", "key", "value", "g", "beta")
_Call = call_of(npu_ops.chunk_gated_delta_rule)
_STATE = ("initial_state", "output_final_state", "use_qk_l2norm_in_kernel")


def patches() -> Iterable[Patch]:
    """Patch `torch_chunk_gated_delta_rule`, which calls fla's function if fla is installed."""
    yield from models.compared(
        models.linear(),
        models.RULE,
        "chunk_gated_delta_rule",
        (Variant(ours, _calls),),
        (*_HEAD, "chunk_size", *_STATE, "kwargs"),
        (*_HEAD, "chunk_size", *_STATE),  # 4
    )


def _calls(function) -> list[tuple]:
    """Return small calls with two chunks, of which the second is not full."""
    tiny, plain, state = delta_rule_arguments(tokens=19)
    return [(*tiny, 16, state, True, True), (*plain, 16)]


def delta_rule_arguments(tokens: int, by_channel: bool = False) -> tuple:
    """Return `(q, k, v, g, beta)` of two small calls, and a state. beta is at most 2.

    One call is in fp32, with q and k so small that the norm's epsilon matters. The other has q, k
    and v in bf16. by_channel: g has a value per key channel.
    """
    draw = Draw()
    q, k, v = (draw.normal(2, tokens, 4, width) for width in (8, 8, 6))
    g = -draw.uniform(*(q.shape if by_channel else q.shape[:3]))
    gates = g, 2 * draw.uniform(*q.shape[:3])
    half = (x.bfloat16() for x in (q, k, v))
    return (1e-3 * q, 1e-3 * k, v, *gates), (*half, *gates), draw.normal(2, 4, 8, 6)


def ours(
    query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, cu_seqlens=None, **unread,
) -> Callable:  # fmt: skip
    """Return the npu-ops call for this call of transformers. Arguments in `unread` are ignored.

    Raises:
        RuntimeError: verl's Ulysses has split the sequence over ranks. Each rank would start with
            a new state.
    """
    check_whole("verl supports Gated Delta Net over several ranks only for Qwen3.5")
    check.one_of("chunk_size", chunk_size, CHUNK_SIZES)
    arguments = checked(query, key, value, g, beta, initial_state, cu_seqlens)
    return functools.partial(
        npu_ops.chunk_gated_delta_rule, **arguments, chunk_size=chunk_size,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )  # fmt: skip


def check_whole(why: str) -> None:
    """Raise RuntimeError if verl's Ulysses has split the sequence over ranks."""
    if ulysses.size() > 1:
        raise RuntimeError(
            f"query: got 1 of {ulysses.size()} spans of a sequence (verl's Ulysses), needs all of "
            f"it: {why}"
        )


def checked(q, k, v, g, beta, initial_state, cu_seqlens) -> dict:
    """Check the arguments, and return them under npu-ops' names; see `checked_by`."""
    return checked_by(
        _Call, check_call, q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip


def checked_by(call: Callable, check_call: Callable, *, initial_state, **given) -> dict:
    """Check the arguments and return them by name. As in transformers, the state becomes fp32.

    call: makes a NamedTuple of the public function's arguments. check_call: checks that tuple.
    given: the arguments except the state, under npu-ops' names.
    """
    if initial_state is not None:
        check.floating("initial_state", initial_state)
        initial_state = initial_state.to(torch.float32)
    given["initial_state"] = initial_state
    check_call(call(**given))
    check_device(given["q"])
    # fp64 is refused, because transformers computes it in fp32.
    check.one_of("q's dtype", given["q"].dtype, check.KERNEL_DTYPES)
    return given
