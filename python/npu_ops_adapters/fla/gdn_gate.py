"""Replaces fla's `fused_gdn_gate`, which computes the decay of Gated Delta Net."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

import npu_ops
from npu_ops.core import check
from npu_ops_adapters.calls import check_device
from npu_ops_adapters.fla import functions
from npu_ops_adapters.patching import Patch


def patches() -> Iterable[Patch]:
    """Patch `fused_gdn_gate`."""
    yield functions.replaced(
        ("fla.ops.gated_delta_rule.gate",), "fused_gdn_gate", ours, op="gdn_gate"
    )


def ours(g, A_log, dt_bias=None, output_dtype=torch.float32) -> Callable:
    """Return a function that computes fla's call with npu-ops.

    Raises:
        TypeError, ValueError: npu-ops does not support the call, e.g. an output_dtype other than
            float32.
    """
    tensors = {"g": g, "A_log": A_log} | ({} if dt_bias is None else {"dt_bias": dt_bias})
    for name, x in tensors.items():
        check.floating(name, x)
        check.one_of(f"{name}'s dtype", x.dtype, check.KERNEL_DTYPES)
        check.same_device(name, x, "g", g)
        if x is not g and x.shape != g.shape[-1:]:
            raise check.shape(name, x, f"{list(g.shape[-1:])}, one number for each head")
    check_device(g)
    check.one_of("output_dtype", output_dtype, (torch.float32,))
    return functools.partial(npu_ops.gdn_gate, g, A_log, dt_bias)
