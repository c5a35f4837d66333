"""Gated Delta Net's decoding step as a torch operator: schema, fake kernel, implementations."""

from __future__ import annotations

import torch

from npu_ops.core import library
from npu_ops.core.registry import Implementation, Table, from_module, from_native
from npu_ops.ops.gated_delta_rule_update import reference

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, "
    "Tensor(a!) state, Tensor state_indices, Tensor? cu_seqlens, Tensor? num_accepted_tokens, "
    "Tensor(b!)? intermediate_states, Tensor? intermediate_state_indices, float scale, "
    "bool normalize, bool state_v_first, bool update"
)


def _triton_why_not(*args) -> str | None:
    return library.triton_why_not() or library.dtype_why_not(*args)


def _cpu_why_not(*args) -> str | None:
    return library.build_info()["why_not"] or library.dtype_why_not(*args)


def _reference(*args):
    *inputs, o = args
    o.copy_(reference.gated_delta_rule_update(*inputs))


table = Table(
    "gated_delta_rule_update",
    [
        Implementation(
            "triton_ascend",
            from_module(
                "npu_ops.ops.gated_delta_rule_update.triton_ascend:gated_delta_rule_update"
            ),
            frozenset({"npu", "cuda"}),
            _triton_why_not,
        ),
        Implementation(
            "cpu",
            from_native(f"gated_delta_rule_update_cpu({_ARGUMENTS}, Tensor(c!) o) -> ()"),
            frozenset({"cpu"}),
            _cpu_why_not,
        ),
        Implementation("reference", lambda: _reference, frozenset(), lambda *args: None),
    ],
)


def _rows(x):
    """x with everything but its first dimension contiguous, as the kernels read it."""
    return x if x[:1].is_contiguous() else x.contiguous()


def _dense(x):
    return None if x is None else x.contiguous()


def _run(*args):
    q, k, v, a, b, A_log, dt_bias, state, slots, cu_seqlens, accepted, kept, rows, *settings = args
    o = library.new_output(v, memory_format=torch.contiguous_format)
    if not v.shape[0]:
        return o
    table.run(
        *map(_rows, (q, k, v, a, b)), *map(_dense, (A_log, dt_bias)), state, slots,
        *map(_dense, (cu_seqlens, accepted)), kept, _dense(rows), *settings, o,
    )  # fmt: skip
    library.written(*(x for x in (state, kept) if x is not None))
    return o


def _fake(q, k, v, *args):
    return torch.empty_like(v, memory_format=torch.contiguous_format)


library.operator(f"gated_delta_rule_update({_ARGUMENTS}) -> Tensor", _run, _fake)


def call(*args):
    """Run directly where nothing watches, else through torch."""
    if library.is_plain(*args[:13]):
        return _run(*args)
    return library.call("gated_delta_rule_update", *args)
