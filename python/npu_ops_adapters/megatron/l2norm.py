"""Replaces the l2norm of queries and keys that Megatron's GatedDeltaNet takes from fla."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

import npu_ops
from npu_ops.core import check
from npu_ops_adapters.megatron import gated_delta_net
from npu_ops_adapters.patching import Patch

SIGNATURES = (None, ("x", "eps", "output_dtype"))


def patches() -> Iterable[Patch]:
    """Patch `l2norm`. Before Megatron-Core 0.18 the name is missing if fla is not installed."""
    yield from gated_delta_net.replaced(
        "l2norm",
        "l2norm",
        replace,
        signatures=SIGNATURES,
        optional=True,
        also=gated_delta_net.importers(),
    )


def replace(original: Callable | None) -> Callable:
    @functools.wraps(original or npu_ops.l2norm, assigned=(), updated=())
    def npu_ops_l2norm(x, *args, **kwargs):
        if original is None or _is_ours(x):
            return npu_ops.l2norm(x, *args, **kwargs)
        return original(x, *args, **kwargs)

    return npu_ops_l2norm


def _is_ours(x) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype in check.FLOATS and x.dim() > 0
