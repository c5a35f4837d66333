"""Replaces the gated delta rule token by token: decoding with a cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import npu_ops
from npu_ops.core import env
from npu_ops.core.signature import call_of
from npu_ops.ops.fused_recurrent_gated_delta_rule.arguments import check_call
from npu_ops_adapters.calls import check_device, token_by_token
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.transformers import models
from npu_ops_adapters.transformers.chunk_gated_delta_rule import checked, delta_rule_arguments
from npu_ops_adapters.transformers.chunk_kda import ours as by_chunks
from npu_ops_adapters.transformers.equivalence import Variant

_Call = call_of(npu_ops.fused_recurrent_gated_delta_rule)
_NAMES = (
    *("query", "key", "value", "g", "beta", "initial_state", "output_final_state"),
    "use_qk_l2norm_in_kernel",
)


def patches() -> Iterable[Patch]:
    """Patch `torch_recurrent_gated_delta_rule`, and the version with a decay per key channel (KDA).

    Both call fla's function if fla is installed.
    """
    linear, op = models.linear(), "fused_recurrent_gated_delta_rule"
    signatures = ((*_NAMES, "kwargs"), _NAMES)  # version 4 has no kwargs
    for name, variant in (
        ("torch_recurrent_gated_delta_rule", Variant(ours, _calls)),
        ("recurrent_kimi_delta_attention", Variant(ours_by_channel, _calls_by_channel)),
    ):
        yield from models.compared(linear, name, op, (variant,), *signatures)


def _calls(function, by_channel: bool = False) -> list[tuple]:
    tiny, plain, state = delta_rule_arguments(3, by_channel)
    return [(*tiny, state, True, True), (*plain, None, False)]


def _calls_by_channel(function) -> list[tuple]:
    return _calls(function, by_channel=True)


def ours(
    query, key, value, g, beta, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, cu_seqlens=None, **unread,
) -> Callable:  # fmt: skip
    """Return the npu-ops call for this call of transformers. Arguments in `unread` are ignored."""
    arguments = checked(query, key, value, g, beta, initial_state, cu_seqlens)
    return functools.partial(
        token_by_token, **arguments,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )  # fmt: skip


def ours_by_channel(
    query, key, value, g, beta, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, cu_seqlens=None, **unread,
) -> Callable:  # fmt: skip
    """Return the npu-ops call for this call of transformers; g is `[B, T, HV, K]`.

    With NPU_OPS_CONSISTENT=1 the call runs `chunk_kda`, as training does.
    """
    if env.settings.consistent == "chunks":
        raise ValueError("g: got a decay per key channel, whose states carry no unfinished chunk")
    if env.settings.consistent:
        return by_chunks(
            query, key, value, g, beta, 64, initial_state, output_final_state,
            use_qk_l2norm_in_kernel, cu_seqlens,
        )  # fmt: skip
    call = _Call(
        q=query, k=key, v=value, gk=g, beta=beta, initial_state=initial_state,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip
    check_call(call)
    check_device(query)
    return functools.partial(npu_ops.fused_recurrent_gated_delta_rule, *call)
