"""NPU_OPS_CONSISTENT: replaces operators of torch and torch_npu that models and trainers call.

A trainer and a server often use operators that sum in another order or round at other places. With
the replacements both get the same bits, whichever Python function they call. Each module replaces
one kind of operator and lists them in `OPERATORS`.
"""

from __future__ import annotations

import torch

from npu_ops.consistent import experts, norms, products
from npu_ops.core import library

__all__ = ["install", "installed", "remove"]

_libraries: list[torch.library.Library] = []


def install() -> None:
    """Replace the operators in this process, once: NPU kernels, or CPU kernels if torch has no NPU.

    Raises:
        RuntimeError: on a CPU without native kernels, which the matrix products need.
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
    """Return whether the operators are replaced."""
    return bool(_libraries)


def remove() -> None:
    """Restore PyTorch's operators."""
    for made in _libraries:
        made._destroy()
    _libraries.clear()
    _forget_what_was_traced()


def _operators(device: str) -> list[tuple]:
    """Return (namespace, operators, dispatch keys to replace them at).

    For some operators of torch_npu, npu-ops takes only some calls. These are replaced at
    BackendSelect, which every call passes before it reaches its device's kernel.
    """
    keys = device, f"Autograd{device}"
    found = [("aten", products.OPERATORS | norms.OPERATORS, *keys)]
    if device != "CPU":  # torch_npu's operators have NPU kernels only
        found += [
            ("aten", norms.OPERATORS_UNDER_AUTOCAST, f"Autocast{device}"),
            ("npu", norms.OPERATORS_OF_TORCH_NPU | experts.OPERATORS_OF_TORCH_NPU, *keys),
            ("npu", experts.SHARED_WITH_TORCH_NPU, "BackendSelect"),
        ]
    return found


def _forget_what_was_traced() -> None:
    """Clear the Python dispatcher's cache of these operators: it keeps kernels found in a trace."""
    for name in products.OPERATORS | norms.OPERATORS | norms.OPERATORS_UNDER_AUTOCAST:
        getattr(torch.ops.aten, name).default._dispatch_cache.clear()
