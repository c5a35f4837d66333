"""Replaces fla's `causal_conv1d`, the short convolution before linear attention."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable

import npu_ops
from npu_ops.core import check
from npu_ops.ops.causal_conv1d import arguments
from npu_ops_adapters.calls import check_device
from npu_ops_adapters.fla import functions
from npu_ops_adapters.patching import Patch


def patches() -> Iterable[Patch]:
    """Patch `causal_conv1d`, which `ShortConvolution` calls too."""
    yield functions.replaced(
        ("fla.modules.causal_conv1d.ops", "fla.modules.conv.causal_conv1d"), "causal_conv1d", ours
    )


def ours(
    x, weight=None, bias=None, residual=None, initial_state=None, output_final_state=False,
    activation=None, backend="triton", cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None,
    cp_context=None, **kwargs,
) -> Callable:  # fmt: skip
    """Return a function that computes fla's call with npu-ops.

    x: `[B, T, ...]`, with one or more channel dimensions.

    Raises:
        TypeError, ValueError: npu-ops does not support the call.
    """
    functions.refuse(**kwargs)
    check.one_of("backend", backend, ("triton",))
    check.floating("x", x)
    check.tensor("weight", weight)
    check_device(x)
    if x.dim() < 3 or math.prod(x.shape[2:]) != weight.shape[0]:
        raise check.shape("x", x, f"[B, T, ...] of {weight.shape[0]} channels")
    rows = x.flatten(2)
    arguments.check_filter(weight, bias, activation, rows)
    arguments.check_like_x("residual", residual, x, x.shape, "x's shape")
    sequences, shared = x.shape[0], {"cu_seqlens": cu_seqlens}
    if cp_context is not None:
        shared = functions.shared(cp_context, x, initial_state, output_final_state)
    elif cu_seqlens is not None:
        arguments.check_starts("cu_seqlens", cu_seqlens, x, x.shape[1])
        if x.shape[0] != 1:
            raise check.shape("x", x, "a batch of 1 with cu_seqlens")
        sequences = cu_seqlens.shape[0] - 1
    arguments.check_like_x(
        "initial_state", initial_state, x, (sequences, *weight.shape), "[N, D, W], here"
    )
    call = functools.partial(
        npu_ops.causal_conv1d, rows, weight, bias,
        residual=None if residual is None else residual.flatten(2), initial_state=initial_state,
        output_final_state=output_final_state, activation=activation, **shared,
    )  # fmt: skip
    return call if x.dim() == 3 else functools.partial(_shaped, call, x.shape)


def _shaped(call: Callable, shape):
    y, state = call()
    return y.view(shape), state
