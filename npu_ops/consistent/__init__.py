"""With NPU_OPS_CONSISTENT: the operators of torch and torch_npu that models and trainers call.

Each computes some things in an order of its own: a product by the number of its rows, a norm or an
activation with more roundings or fewer. Whoever calls them gets ours then, whatever the Python
function is, so that a trainer and a server that use different ones have the same bits. One module a
kind, each with the `OPERATORS` that it replaces.
"""

from __future__ import annotations

import torch

from npu_ops.consistent import experts, norms, products
from npu_ops.core import library

__all__ = ["install", "installed", "remove"]

_libraries: list[torch.library.Library] = []


def install() -> None:
    """Replace the operators of this process, once: on NPUs, and where torch has none, on the CPU.

    Raises:
        RuntimeError: on a CPU, the native kernels are not there, which compute products.
    """
    if _libraries:
        return
    device = "PrivateUse1" if hasattr(torch, "npu") else "CPU"
    if device == "CPU" and (why := library.native_why_not()):
        raise RuntimeError(f"NPU_OPS_CONSISTENT: products on a CPU need the native kernels: {why}")
    for name, operators, *keys in _operators(device):
        made = torch.library.Library(name, "IMPL")
        for operator, ours in operators.items():
            for key in keys:
                made.impl(operator, ours, key)
        _libraries.append(made)
    _forget_what_was_traced()


def installed() -> bool:
    """Whether operators are replaced."""
    return bool(_libraries)


def remove() -> None:
    """Give PyTorch its own back."""
    for made in _libraries:
        made._destroy()
    _libraries.clear()
    _forget_what_was_traced()


def _operators(device: str) -> list[tuple]:
    """Namespace, operators, and the keys of the dispatcher at which they are ours.

    Of some operators of torch_npu only some calls are: these are ours at BackendSelect, which every
    call passes on its way to a device.
    """
    keys = device, f"Autograd{device}"
    found = [("aten", products.OPERATORS | norms.OPERATORS, *keys)]
    if device != "CPU":  # torch_npu's are for NPUs alone
        found += [
            ("npu", norms.OPERATORS_OF_TORCH_NPU | experts.OPERATORS_OF_TORCH_NPU, *keys),
            ("npu", experts.SHARED_WITH_TORCH_NPU, "BackendSelect"),
        ]
    return found


def _forget_what_was_traced() -> None:
    """Make torch look up the kernels of these operators again: its dispatcher in Python keeps those
    that it found when it first traced them."""
    for name in products.OPERATORS | norms.OPERATORS:
        getattr(torch.ops.aten, name).default._dispatch_cache.clear()
