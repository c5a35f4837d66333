"""Computes a grouped matrix product over all experts in one kernel launch, on NPUs.

torch_npu for torch 2.7 to 2.13 has no kernel for PyTorch's grouped product. There PyTorch's
function fails, or waits for each group's length and runs one product per group. transformers' own
function also runs one product per group.

With NPU_OPS_CONSISTENT, transformers' grouped implementation replaces its other implementations in
PyTorch. It then adds a token's experts in order of expert id, as npu-ops does in each framework.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

import npu_ops
from npu_ops.consistent.experts import order_of
from npu_ops.core import check, env
from npu_ops_adapters.calls import check_device, falling_through
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.transformers import models

_HOME = "transformers.integrations.moe"
_WHY = "it waits for the number of tokens per expert, and launches a product per expert"


def patches() -> Iterable[Patch]:
    """Patch the grouped product; with NPU_OPS_CONSISTENT also the choice of an implementation."""
    make = functools.partial(falling_through, ours, op="grouped_linear")
    names = ("input", "weight", "offs", "bias", "is_transposed")
    yield models.patch(f"{_HOME}:_grouped_linear", "grouped_linear", make, (names,), why=_WHY)
    if env.settings.consistent:
        yield models.patch(
            f"{_HOME}:ExpertsInterface.get_interface", "grouped_linear", always_grouped,
            (("self", "experts_implementation", "default"),),
            why="its other implementations give other bits than grouped products",
        )  # fmt: skip


def ours(input, weight, offs, bias=None, is_transposed=False) -> Callable:
    """Return the npu-ops call for this call of transformers."""
    check_device(input)
    if not env.settings.consistent and (input.device.type == "cpu" or pytorch_has_one()):
        raise ValueError("input: got a tensor for which PyTorch has a grouped product")
    check.alone("a grouped product", bias=bias)
    if is_transposed:
        weight = weight.transpose(-2, -1)
    x = input.to(weight.dtype)
    return functools.partial(npu_ops.grouped_linear, x, weight, offs)


@functools.cache
def pytorch_has_one() -> bool:
    """Return whether torch_npu has a kernel for PyTorch's grouped product."""
    name = "aten::_grouped_mm"
    known = torch._C._dispatch_has_kernel(name)
    return known and torch._C._dispatch_has_kernel_for_dispatch_key(name, "PrivateUse1")


def always_grouped(original: Callable) -> Callable:
    """Wrap `get_interface` to return the grouped implementation in place of every PyTorch one."""

    @functools.wraps(original)
    def get_interface(self, experts_implementation, default):
        if experts_implementation in (None, "eager", "batched_mm", "grouped_mm"):
            return in_order_of_id(original(self, "grouped_mm", default))
        return original(self, experts_implementation, default)

    return get_interface


@functools.cache
def in_order_of_id(compute: Callable) -> Callable:
    """Wrap transformers' grouped function so that it adds a token's experts in order of id."""

    @functools.wraps(compute)
    def experts(self, hidden_states, top_k_index, top_k_weights):
        order = order_of(top_k_index)
        named = top_k_index.gather(-1, order), top_k_weights.gather(-1, order)
        return compute(self, hidden_states, *named)

    return experts
