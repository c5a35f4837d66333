"""Replaces the decoding step of fla's short convolution: one token per sequence."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

import npu_ops
from npu_ops.core import check
from npu_ops.ops.causal_conv1d import arguments
from npu_ops_adapters.calls import check_device
from npu_ops_adapters.fla import functions
from npu_ops_adapters.patching import Patch


def patches() -> Iterable[Patch]:
    """Patch `causal_conv1d_update`, which `ShortConvolution.step` calls."""
    yield functions.replaced(
        ("fla.modules.causal_conv1d.ops", "fla.modules.conv.triton.ops"),
        "causal_conv1d_update",
        ours,
    )


def ours(x, cache, residual=None, weight=None, bias=None, activation=None) -> Callable:
    """Return the npu-ops call for this call of fla. Neither call computes gradients.

    x is `[N, D]`, `[1, N, D]` or `[N, 1, D]`.
    """
    check.floating("x", x)
    check.tensor("weight", weight)
    check_device(x)
    if x.dim() not in (2, 3) or (x.dim() == 3 and 1 not in x.shape[:2]):
        raise check.shape("x", x, "[N, D], [1, N, D] or [N, 1, D]")
    arguments.check_filter(weight, bias, activation, x)
    arguments.check_like_x("residual", residual, x, x.shape, "x's shape")
    needs = (x.numel() // weight.shape[0], *weight.shape)
    arguments.check_like_x("cache", cache, x, needs, "[N, D, W], here")
    step = _step if residual is None else functools.partial(_step_with, residual)
    return functools.partial(step, x, cache, weight, bias, activation)


@torch.no_grad()
def _step(x, cache, weight, bias, activation):
    """Decode one token.

    fla's cache `[N, D, W]` holds one token more than npu-ops' states. The oldest is shifted out
    here; npu-ops updates the other W - 1.
    """
    cache[..., 0] = cache[..., 1]
    rows = x.reshape(-1, weight.shape[0])
    y = npu_ops.causal_conv1d_update(rows, cache[..., 1:], weight, bias, activation)
    return y.view(x.shape), cache


@torch.no_grad()
def _step_with(residual, x, cache, weight, bias, activation):
    """Decode one token with a residual: use `causal_conv1d`, as the update op takes no residual."""
    rows, residual = (tensor.reshape(-1, 1, weight.shape[0]) for tensor in (x, residual))
    y, state = npu_ops.causal_conv1d(
        rows, weight, bias, residual=residual, initial_state=cache, output_final_state=True,
        activation=activation,
    )  # fmt: skip
    cache.copy_(state)
    return y.view(x.shape), cache
