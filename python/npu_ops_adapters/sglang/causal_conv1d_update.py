"""Replaces SGLang's short convolution of new tokens: one per sequence, or a few draft tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

import npu_ops
from npu_ops.core import make
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.sglang import functions

_HEAD = (
    *("x", "conv_state", "weight", "bias", "activation", "cache_seqlens", "conv_state_indices"),
)
_WINDOW = ("intermediate_conv_window", "intermediate_state_indices")
_TREE = ("retrieve_next_token", "retrieve_next_sibling", "retrieve_parent_token")
_TAIL = ("pad_slot_id", "metadata", "validate_data")


def patches() -> Iterable[Patch]:
    """Patch `causal_conv1d_update` in the module of the Gated Delta Net backend."""
    yield functions.replaced(
        f"{functions.gated_delta_net()}:causal_conv1d_update",
        "causal_conv1d_update",
        ours,
        "on NPUs it needs a transposed pool, and so copies the whole pool at each step",
        (*_HEAD, "num_accepted_tokens", *_WINDOW, *_TREE, *_TAIL),
        (*_HEAD, "num_accept_tokens", *_WINDOW, *_TREE, *_TAIL),
        (*_HEAD, "num_accepted_tokens", "intermediate_conv_window", *_TAIL),
        rebind=False,  # do not replace it under a second name in the same module
    )


def ours(
    x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None,
    num_accepted_tokens=None, intermediate_conv_window=None, intermediate_state_indices=None,
    retrieve_next_token=None, retrieve_next_sibling=None, retrieve_parent_token=None,
    pad_slot_id=-1, metadata=None, validate_data=False, num_accept_tokens=None,
):  # fmt: skip
    """Compute the convolution of x `[B, D]` or, with draft tokens, `[B, D, T]`.

    Trees of draft tokens are not supported. If the pool has another dtype than x, its slots are
    converted to x's dtype and back.
    """
    functions.check_device(x)
    functions.check_pool("conv_state", conv_state, x, functions.CONV_DTYPE)
    functions.refuse(cache_seqlens=cache_seqlens, retrieve_parent_token=retrieve_parent_token)
    drafted = x.dim() == 3
    accepted = num_accepted_tokens if num_accepted_tokens is not None else num_accept_tokens
    update = functools.partial(
        npu_ops.causal_conv1d_update,
        x.transpose(1, 2) if drafted else x,
        weight=weight,
        bias=bias,
        activation="silu" if activation is True else activation or None,
        num_accepted_tokens=accepted,
        pad_slot_id=pad_slot_id,
        intermediate_conv_window=intermediate_conv_window,
        intermediate_state_indices=intermediate_state_indices,
    )
    if conv_state.dtype == x.dtype or conv_state_indices is None or pad_slot_id != -1:
        y = update(conv_state=conv_state, conv_state_indices=conv_state_indices)
    else:
        y = _converted(update, x.dtype, conv_state, conv_state_indices)
    return y.transpose(1, 2) if drafted else y


def _converted(update: Callable, dtype: torch.dtype, pool, slots):
    states = functions.read_slots(pool, slots).to(dtype)
    rows = make.counted(slots.shape[0], device=slots.device)
    y = update(conv_state=states, conv_state_indices=torch.where(slots < 0, -1, rows))
    functions.write_slots(pool, slots, states)
    return y
