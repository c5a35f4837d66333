"""The short convolution before linear attention, in prefill.

Only vllm-ascend 0.18.0 has this function in Python. Qwen's layers instead call an AscendC operator,
for which they copy lengths and slots to the host. `gated_delta_net` replaces that part of the
layers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import npu_ops
from npu_ops_adapters.patching import Patch
from npu_ops_adapters.serving import check_device, padded, tokens_of_sequences
from npu_ops_adapters.vllm import functions

MODULE = f"{functions.TRITON}.mamba.causal_conv1d"


def patches() -> Iterable[Patch]:
    """Patch `causal_conv1d_fn`, unless the imported module is a later version's, which has none."""
    module = sys.modules.get(MODULE)
    if module is None or hasattr(module, "causal_conv1d_fn"):
        yield functions.replaced(
            f"{MODULE}:causal_conv1d_fn",
            "causal_conv1d",
            ours,
            "a loop of PyTorch over the sequences, whose lengths it copies to the host",
        )


def ours(
    x, weight, bias=None, activation="silu", conv_states=None, has_initial_state=None,
    cache_indices=None, query_start_loc=None, metadata=None, pad_slot_id=-1,
):  # fmt: skip
    """Convolve x `[D, T]`, and update the slots `[D, L]` of conv_states.

    The first W - 1 columns of a slot are the last tokens of its sequence; W is the filter's width.
    A sequence whose has_initial_state is False begins with zeros. vllm-ascend's function ignores
    has_initial_state, and begins with the slot's content.
    """
    check_device(x)
    functions.check_ranks()
    if conv_states is None or query_start_loc is None or cache_indices is None:
        raise ValueError("conv_states, query_start_loc, cache_indices: got None, needs tensors")
    x, tokens = tokens_of_sequences(x.transpose(0, 1), query_start_loc)
    y, _ = npu_ops.causal_conv1d(
        x[None],
        weight,
        bias,
        activation=activation,
        cu_seqlens=query_start_loc,
        conv_state=conv_states,
        conv_state_indices=cache_indices,
        has_initial_state=has_initial_state,
        pad_slot_id=pad_slot_id,
    )
    return padded(y[0], tokens).transpose(0, 1)
