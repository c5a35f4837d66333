"""Computes Gated Delta Net's decay exp(A_log) in fp32, for Megatron-Core 0.16 and 0.17.

These versions round exp(A_log) to the parameter's dtype, so a trainer in bf16 has another decay
than transformers and all servers. From 0.18 on, a method computes the gates; gdn_gate.py replaces
that method.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable

from npu_ops_adapters.megatron import gated_delta_net
from npu_ops_adapters.patching import Patch


def patches() -> Iterable[Patch]:
    """Patch `forward` if it computes the decay itself."""
    for module, owner, layer in gated_delta_net.layers():
        if "forward" in vars(layer) and computes_it(layer.forward):
            yield from gated_delta_net.replaced(
                f"{owner}.forward", "gdn_decay", with_fp32, (), module=module,
                why="it rounds exp(A_log) to the parameter's dtype",
                remove_when="Megatron-Core 0.16 and 0.17 are no longer used",
            )  # fmt: skip


def computes_it(forward: Callable) -> bool:
    """Return whether a layer's `forward` computes the gates inline."""
    return "softplus" in inspect.unwrap(forward).__code__.co_names


def with_fp32(original: Callable) -> Callable:
    """Wrap `forward` so that it reads A_log in fp32."""

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        # An entry in the instance's __dict__ shadows the parameter in attribute lookup.
        vars(self)["A_log"] = self._parameters["A_log"].float()
        try:
            return original(self, *args, **kwargs)
        finally:
            del vars(self)["A_log"]

    return forward
