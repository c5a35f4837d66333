"""Replaces SGLang's short convolution before linear attention, in prefill."""

from __future__ import annotations

from collections.abc import Iterable

import npu_ops
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.sglang import functions

_HEAD = (
    *("x", "weight", "bias", "conv_states", "query_start_loc", "seq_lens_cpu", "cache_indices"),
    *("has_initial_state", "activation", "pad_slot_id", "validate_data"),
)
_ON_NPU = (
    *("x", "weight", "bias", "query_start_loc", "cache_indices", "has_initial_state"),
    *("conv_states", "activation", "pad_slot_id", "kwargs"),
)


def patches() -> Iterable[Patch]:
    """Patch `causal_conv1d_fn` in the module of the Gated Delta Net backend."""
    yield functions.replaced(
        f"{functions.gated_delta_net()}:causal_conv1d_fn",
        "causal_conv1d",
        ours,
        "on NPUs it launches a dozen kernels, pads all sequences and waits for the device",
        (*_HEAD, "kwargs"),
        (*_HEAD, "block_table", "kwargs"),
        _ON_NPU,
        rebind=False,  # do not replace it under a second name in the same module
    )


def ours(
    x, weight, bias=None, *arguments, conv_states=None, query_start_loc=None, seq_lens_cpu=None,
    cache_indices=None, has_initial_state=None, activation="silu", pad_slot_id=-1,
    validate_data=False, block_table=None, **options,
):  # fmt: skip
    """Compute the convolution of packed x `[D, T]`.

    conv_states: the pool `[slots, D, W - 1]`, with the last tokens of each sequence, of any float
    dtype. block_table: ignored.
    """
    functions.check_device(x)
    if arguments or conv_states is None or query_start_loc is None:
        raise ValueError("got other arguments than SGLang's backends pass")
    if conv_states.shape[2] != weight.shape[1] - 1:
        raise ValueError(f"conv_states: got {list(conv_states.shape)}, needs W - 1 columns")
    functions.check_pool("conv_states", conv_states, x, functions.CONV_DTYPE)
    x, tokens = functions.tokens_of_sequences(x.transpose(0, 1), query_start_loc)
    y, _ = npu_ops.causal_conv1d(
        x[None],
        weight,
        bias,
        activation="silu" if activation is True else activation or None,
        cu_seqlens=query_start_loc,
        conv_state=conv_states,
        conv_state_indices=cache_indices,
        has_initial_state=has_initial_state,
        pad_slot_id=pad_slot_id,
    )
    return functions.padded(y[0], tokens).transpose(0, 1)
