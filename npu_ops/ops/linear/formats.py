"""Shared by linear and grouped_linear: rejects the vendor's formats that do not store rows."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import is_fake

# Values of torch_npu's enumeration: undefined, NCHW, NHWC, ND, NCDHW.
_WITH_ROWS = (-1, 0, 1, 2, 30)


def format_why_not(x: torch.Tensor) -> str | None:
    """Return the format of a matrix that an NPU does not store in rows (e.g. FRACTAL_NZ), or None.

    The format of a traced tensor is unknown, so return None: the graph checks again when it runs.
    """
    if x.device.type != "npu" or is_fake(x):
        return None
    from torch_npu import get_npu_format

    found = get_npu_format(x)
    return None if found in _WITH_ROWS else f"the vendor's format {found}"


def against(arguments) -> str | None:
    """Return why the kernel does not support an operator's arguments, or None."""
    for name in ("x", "weight"):
        if why := format_why_not(getattr(arguments, name)):
            return f"{name} has {why}"
    return None


def refused(reference: Callable) -> Callable:
    """Wrap a reference so that it rejects the vendor's formats.

    The reference would accept them, but silently give other bits than the kernel.

    Raises, when it is called:
        ValueError: x or weight has such a format.
    """

    @functools.wraps(reference)
    def checked(x, weight, *others):
        for name, tensor in (("x", x), ("weight", weight)):
            if why := format_why_not(tensor):
                raise ValueError(f"{name}: got {why}, needs format ND")
        return reference(x, weight, *others)

    return checked
