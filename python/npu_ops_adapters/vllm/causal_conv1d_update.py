"""The convolution of new tokens: one per sequence in decoding, a few in verification."""

from __future__ import annotations

from collections.abc import Iterable

import npu_ops
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.serving import check_device, refuse
from npu_ops_adapters.vllm import functions


def patches() -> Iterable[Patch]:
    """Patch `causal_conv1d_update_npu`, which is vLLM's `causal_conv1d_update` on NPUs."""
    yield functions.replaced(
        f"{functions.TRITON}.mamba.causal_conv1d:causal_conv1d_update_npu",
        "causal_conv1d_update",
        ours,
        "it rounds the earlier tokens of a sequence to fp16, and writes its result over x",
    )


def ours(
    x, conv_state, weight, bias=None, activation=None, conv_state_indices=None,
    num_accepted_tokens=None, query_start_loc=None, max_query_len=-1, pad_slot_id=-1,
    block_idx_last_scheduled_token=None, initial_state_idx=None, validate_data=False,
):  # fmt: skip
    """Convolve x `[B, D]`, or with query_start_loc `[tokens, D]`; slots are `[D, L]`.

    x may also be `[B, D, T]`, as in vllm-ascend's documentation and tests, or `[B, T, D]`, as in
    its code.
    """
    check_device(x)
    refuse(
        block_idx_last_scheduled_token=block_idx_last_scheduled_token,
        initial_state_idx=initial_state_idx,
    )
    channels = weight.shape[0]
    turned = x.dim() == 3 and x.shape[1] == channels != x.shape[2]
    y = npu_ops.causal_conv1d_update(
        x.transpose(1, 2) if turned else x,
        conv_state,
        weight,
        bias,
        "silu" if activation is True else activation or None,
        conv_state_indices,
        num_accepted_tokens,
        query_start_loc,
        pad_slot_id=-1 if pad_slot_id is None else pad_slot_id,
    )
    return y.transpose(1, 2) if turned else y
