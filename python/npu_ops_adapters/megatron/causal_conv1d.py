"""Replaces the short convolution of Megatron's Gated Delta Net.

From Megatron-Core 0.18 on, layers take the function from fla. Earlier ones take it from the package
causal-conv1d, whose function has channels before time. Layers use torch.nn.Conv1d if that package
is not installed, and in deterministic mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F

import npu_ops
from npu_ops.core import check
from npu_ops.ops.causal_conv1d.arguments import ACTIVATIONS, WIDTHS
from npu_ops_adapters.megatron import gated_delta_net
from npu_ops_adapters.patching import Patch

_HEAD = ("x", "weight", "bias", "residual")
_STATES = (*_HEAD, "initial_state", "output_final_state", "activation", "backend", "cu_seqlens")
_MINDSPEED = ("x", "weight", "bias", "activation")
SIGNATURES = (
    None,  # without fla
    (*_HEAD, "activation", "cu_seqlens"),  # fla 0.3
    (*_STATES, "kwargs"),  # 0.3.2
    (*_STATES, "chunk_indices", "kwargs"),  # 0.4.1
    (*_STATES, "cu_seqlens_cpu", "chunk_indices", "cp_context", "kwargs"),  # 0.4.2 to 0.6
    (*_MINDSPEED, "initial_state", "output_final_state", "cu_seqlens"),
)
_CHANNELS_FIRST = (
    *("x", "weight", "bias", "seq_idx", "initial_states", "return_final_states"),
    *("final_states_out", "activation"),
)


def patches() -> Iterable[Patch]:
    """Patch `causal_conv1d_fn` up to Megatron-Core 0.17, `causal_conv1d` from 0.18 on."""
    name = gated_delta_net.convolution_name()
    channels_first = name == "causal_conv1d_fn"
    yield from gated_delta_net.replaced(
        name,
        "causal_conv1d",
        _replace_channels_first if channels_first else replace,
        (None, _CHANNELS_FIRST) if channels_first else SIGNATURES,
        also=gated_delta_net.importers(),
    )


def replace(original: Callable | None) -> Callable:
    @functools.wraps(original or npu_ops.causal_conv1d, assigned=(), updated=())
    def npu_ops_convolution(x, weight, bias=None, activation=None, cu_seqlens=None, **options):
        settings = {"activation": activation, "cu_seqlens": cu_seqlens}
        if _is_ours(x, weight, bias, activation, options):
            return npu_ops.causal_conv1d(x, weight, bias, **settings)
        return (original or npu_ops.causal_conv1d)(x, weight, bias, **settings, **options)

    return npu_ops_convolution


def _replace_channels_first(original: Callable | None) -> Callable:
    @functools.wraps(original or npu_ops.causal_conv1d, assigned=(), updated=())
    def npu_ops_convolution(x, weight, bias=None, activation=None, **options):
        rows = x.transpose(1, 2)
        if _is_ours(rows, weight, bias, activation, options):
            return npu_ops.causal_conv1d(rows, weight, bias, activation=activation)[0].mT
        return (original or _convolve)(x, weight, bias, activation=activation, **options)

    return npu_ops_convolution


def _convolve(x, weight, bias=None, activation=None):
    """Compute the convolution as a layer does without the package causal-conv1d."""
    channels, taps = weight.shape
    y = F.conv1d(x, weight[:, None], bias, padding=taps - 1, groups=channels)
    y = y[..., : x.shape[-1]]
    return y if activation is None else F.silu(y)


def _is_ours(x, weight, bias, activation, options: dict) -> bool:
    """Return whether npu-ops supports the call.

    options: residual, states and algorithm settings; Megatron passes none of them.
    """
    filters = [weight] if bias is None else [weight, bias]
    return (
        all(option is None or option is False for option in options.values())
        and isinstance(x, torch.Tensor)
        and x.dtype in check.FLOATS
        and x.dim() == 3
        and all(f.dtype in (x.dtype, torch.float32) and f.device == x.device for f in filters)
        and weight.dim() == 2
        and weight.shape[1] in WIDTHS
        and activation in ACTIVATIONS
    )
