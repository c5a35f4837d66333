"""Replaces the short convolution's decoding step with a cache: one token per sequence."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

import npu_ops
from npu_ops.core import check
from npu_ops.ops.causal_conv1d import arguments
from npu_ops_adapters.calls import check_device
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.transformers import models
from npu_ops_adapters.transformers.equivalence import Draw, Variant

_NAME, _NAME_4 = "causal_conv1d_update", "torch_causal_conv1d_update"


def patches() -> Iterable[Patch]:
    """Patch `causal_conv1d_update`, which version 4 calls `torch_causal_conv1d_update`."""
    linear = models.linear()
    older = models.having(linear, _NAME_4)
    newer = tuple(model for model in linear if model not in older)
    variants = Variant(ours, _calls), Variant(always_silu, _calls)
    for having, name in ((newer, _NAME), (older, _NAME_4)):
        yield from models.compared(having, name, _NAME, variants)


def _calls(function) -> list[tuple]:
    """Return two small calls: with states of W tokens and of W - 1; W is the filter's width."""
    draw = Draw()
    x, weight = draw.normal(2, 6, 1), draw.normal(6, 4)
    half = (x.bfloat16(), draw.normal(2, 6, 3, dtype=torch.bfloat16), weight.bfloat16())
    return [(x, draw.normal(2, 6, 4), weight, draw.normal(6)), (*half, None, "silu")]


def ours(hidden_states, conv_state, weight, bias=None, activation=None) -> Callable:
    """Return the npu-ops call for this call of transformers. It has no gradient.

    hidden_states is `[B, D, 1]`, conv_state `[B, D, W]` or `[B, D, W - 1]`, weight `[D, W]`.
    """
    x, state = hidden_states, conv_state
    for name, tensor in (("hidden_states", x), ("conv_state", state), ("weight", weight)):
        check.floating(name, tensor)
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name}: got a tensor that requires a gradient, needs torch.no_grad()"
            )
    check_device(x)
    if x.dim() != 3 or x.shape[2] != 1:
        raise check.shape("hidden_states", x, "[B, D, 1]")
    arguments.check_filter(weight, bias, activation, x[..., 0])
    check.same_device("conv_state", state, "hidden_states", x)
    check.one_of("conv_state's dtype", state.dtype, (x.dtype,))
    width = weight.shape[1]
    if state.shape not in ((*x.shape[:2], width), (*x.shape[:2], width - 1)):
        raise check.shape("conv_state", state, f"[B, D, {width}]")
    return functools.partial(_step, x, state, weight, bias, activation)


def always_silu(hidden_states, conv_state, weight, bias=None, activation=None) -> Callable:
    """Return the call with SiLU, which the function of version 5.10 and older always applies."""
    return ours(hidden_states, conv_state, weight, bias, "silu")


@torch.no_grad()
def _step(x, state, weight, bias, activation):
    """Decode one token of each sequence, and update the states in place.

    npu-ops' states have W - 1 tokens, those that the filter reads again. If transformers' states
    have W, their oldest token is shifted out here.
    """
    if state.shape[2] == weight.shape[1]:
        state[..., 0] = state[..., 1]
        state = state[..., 1:]
    y = npu_ops.causal_conv1d_update(x[..., 0], state, weight, bias, activation)
    return y.unsqueeze(2)
