"""causal_conv1d_update as a torch operator: schema, fake kernel, implementations."""

from __future__ import annotations

import torch

from npu_ops.core import library
from npu_ops.core.registry import Implementation, Table, from_module, from_native
from npu_ops.ops.causal_conv1d.op import cpu_why_not, rows_of, triton_why_not
from npu_ops.ops.causal_conv1d_update import reference

_ARGUMENTS = (
    "Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, Tensor? indices, "
    "Tensor? accepted, Tensor? starts, Tensor(b!)? window, Tensor? window_indices, int pad, "
    "bool silu, bool update"
)


def _reference(*args):
    *inputs, y = args
    y.copy_(reference.causal_conv1d_update(*inputs))


table = Table(
    "causal_conv1d_update",
    [
        Implementation(
            "triton_ascend",
            from_module("npu_ops.ops.causal_conv1d_update.triton_ascend:causal_conv1d_update"),
            frozenset({"npu", "cuda"}),
            triton_why_not,
        ),
        Implementation(
            "cpu",
            from_native(f"causal_conv1d_update_cpu({_ARGUMENTS}, Tensor(c!) y) -> ()"),
            frozenset({"cpu"}),
            cpu_why_not,
        ),
        Implementation("reference", lambda: _reference, frozenset(), lambda *args: None),
    ],
)


def _dense(numbers):
    """As the kernels read them: one after another."""
    return None if numbers is None else numbers.contiguous()


def _update(x, conv_state, weight, bias, indices, accepted, starts, window, *rest):
    x = rows_of(x)
    y = library.new_output(x)
    if starts is not None:
        y.zero_()  # tokens may be of no sequence
    if x.numel():
        numbers = map(_dense, (indices, accepted, starts))
        window_indices, *rest = rest
        table.run(
            x, conv_state, weight, bias, *numbers, window, _dense(window_indices), *rest, y
        )  # fmt: skip
        library.written(*(t for t in (conv_state, window) if t is not None))
    return y


def _fake(x, *rest):
    return torch.empty_like(rows_of(x))


library.operator(f"causal_conv1d_update({_ARGUMENTS}) -> Tensor", _update, _fake)


def call(*args):
    """Run directly where nothing watches, else through torch."""
    if library.is_plain(*args[:9]):
        return _update(*args)
    return library.call("causal_conv1d_update", *args)
