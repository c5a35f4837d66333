"""Replaces fla's `l2norm`, which normalizes queries and keys in its layers.

fla supports backends only for the two kernels of l2norm, so the function itself is replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import npu_ops
from npu_ops.core import check
from npu_ops_adapters.calls import check_device
from npu_ops_adapters.fla import functions
from npu_ops_adapters.patching import Patch


def patches() -> Iterable[Patch]:
    """Patch `l2norm`, also called `l2_norm`."""
    yield functions.replaced(("fla.modules.norm.l2norm", "fla.modules.l2norm"), "l2norm", ours)


def ours(x, eps=1e-6, output_dtype=None) -> Callable:
    """Return the npu-ops call for this call of fla."""
    check.floating("x", x)
    check_device(x)
    if x.dim() == 0:
        raise check.shape("x", x, "at least one dimension")
    check.one_of("output_dtype", output_dtype, (None, *check.FLOATS))
    return functools.partial(npu_ops.l2norm, x, eps, output_dtype)
