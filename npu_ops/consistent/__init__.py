"""NPU_OPS_CONSISTENT: replaces operators of torch and torch_npu that models and trainers call.

A trainer and a server often call different operators, which sum in different orders or round at
different steps. With the replacements both compute the same bits, whichever Python function they
call. Each module replaces one kind of operator and lists the replacements:
- `OPERATORS`: torch operators;
- `OPERATORS_UNDER_AUTOCAST`: torch operators that are replaced only under autocast;
- `OPERATORS_OF_TORCH_NPU`: torch_npu operators;
- `SHARED_WITH_TORCH_NPU`: torch_npu operators of which torch_npu still computes some calls.
"""

from __future__ import annotations

import torch

from npu_ops.consistent import experts, norms, products
from npu_ops.core import library

__all__ = ["install", "installed", "remove"]

_libraries: list[torch.library.Library] = []


def install() -> None:
    """Replace the operators in this process: on the NPU, or on the CPU if torch_npu is not loaded.

    A second call does nothing.

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
    """Restore the operators of torch and torch_npu."""
    for made in _libraries:
        made._destroy()
    _libraries.clear()
    _forget_what_was_traced()


def _operators(device: str) -> list[tuple]:
    """Return a list of (namespace, operators, dispatch keys to replace them at).

    npu-ops computes only some calls of `SHARED_WITH_TORCH_NPU` and passes the others on to
    torch_npu. These operators are replaced at BackendSelect, which runs before the device's kernel.
    So torch_npu's kernel stays registered, and `library.call_torch_npu` can still reach it.
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
    """Clear torch's Python dispatch cache of the aten operators.

    Tracing fills this cache. It would still return the kernels from before the replacement.
    """
    for name in products.OPERATORS | norms.OPERATORS | norms.OPERATORS_UNDER_AUTOCAST:
        getattr(torch.ops.aten, name).default._dispatch_cache.clear()
