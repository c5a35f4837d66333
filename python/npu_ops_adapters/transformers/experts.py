"""Experts of a mixture: their products in one launch on NPUs, where PyTorch has no kernel for it.

torch_npu of torch 2.7 to 2.13 has none. PyTorch's function fails there, or waits for the end of
each group and makes a product of it, as transformers' own does. With NPU_OPS_CONSISTENT all of
transformers' ways to compute them are the one with grouped products, and it adds a token's experts
in order of expert id, which every framework knows.
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
_WHY = "it waits for the number of tokens of each expert, and launches a product for each"


def patches() -> Iterable[Patch]:
    """Replace the grouped product; with NPU_OPS_CONSISTENT also the choice of a way to compute."""
    make = functools.partial(falling_through, ours, op="grouped_linear")
    names = ("input", "weight", "offs", "bias", "is_transposed")
    yield models.patch(f"{_HOME}:_grouped_linear", "grouped_linear", make, (names,), why=_WHY)
    if env.settings.consistent:
        yield models.patch(
            f"{_HOME}:ExpertsInterface.get_interface", "grouped_linear", always_grouped,
            (("self", "experts_implementation", "default"),),
            why="its other ways have other bits than grouped products",
        )  # fmt: skip


def ours(input, weight, offs, bias=None, is_transposed=False) -> Callable:
    """The call of ours that is this call of transformers'."""
    check_device(input)
    if not env.settings.consistent and (input.device.type == "cpu" or pytorch_has_one()):
        raise ValueError("input: got a tensor where PyTorch's grouped product is at home")
    check.alone("a grouped product", bias=bias)
    if is_transposed:
        weight = weight.transpose(-2, -1)
    x = input.to(weight.dtype)
    return functools.partial(npu_ops.grouped_linear, x, weight, offs)


@functools.cache
def pytorch_has_one() -> bool:
    """Whether torch_npu has a kernel of PyTorch's grouped product."""
    name = "aten::_grouped_mm"
    known = torch._C._dispatch_has_kernel(name)
    return known and torch._C._dispatch_has_kernel_for_dispatch_key(name, "PrivateUse1")


def always_grouped(original: Callable) -> Callable:
    """`get_interface`, which answers with grouped products to all that ask for PyTorch's."""

    @functools.wraps(original)
    def get_interface(self, experts_implementation, default):
        if experts_implementation in (None, "eager", "batched_mm", "grouped_mm"):
            return in_order_of_id(original(self, "grouped_mm", default))
        return original(self, experts_implementation, default)

    return get_interface


@functools.cache
def in_order_of_id(compute: Callable) -> Callable:
    """transformers' function of grouped products, which adds experts in the order it gets them."""

    @functools.wraps(compute)
    def experts(self, hidden_states, top_k_index, top_k_weights):
        order = order_of(top_k_index)
        named = top_k_index.gather(-1, order), top_k_weights.gather(-1, order)
        return compute(self, hidden_states, *named)

    return experts
