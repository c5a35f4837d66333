"""The gated delta rule of prefill, by chunks."""

from __future__ import annotations

from collections.abc import Iterable

import npu_ops
from npu_ops_adapters.patching import Patch, parameters
from npu_ops_adapters.serving import check_device, padded, refuse, tokens_of_sequences
from npu_ops_adapters.vllm import functions


def patches() -> Iterable[Patch]:
    """Patch `chunk_gated_delta_rule`, which is vLLM's on NPUs."""
    names = parameters(ours)
    yield functions.replaced(
        f"{functions.TRITON}.fla.chunk:chunk_gated_delta_rule",
        "chunk_gated_delta_rule",
        ours,
        "eight kernels, which round what is between chunks to the heads' dtype",
        names[:-3],
        names,
    )


def ours(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None,
    prebuilt_meta=None, head_first=False, use_qk_l2norm_in_kernel=False, chunk_indices=None,
    chunk_offsets=None, core_attn_out=None,
):  # fmt: skip
    """Return o and the final states in fp32; a state is `[keys, values]`.

    prebuilt_meta, chunk_indices and chunk_offsets, arguments of vllm-ascend's launches, are
    ignored.
    """
    check_device(q)
    functions.check_ranks()
    refuse(head_first=head_first, core_attn_out=core_attn_out)
    inputs, tokens = (q, k, v, g, beta), q.shape[1]
    if cu_seqlens is not None and q.shape[0] == 1:
        inputs = [tokens_of_sequences(x[0], cu_seqlens)[0][None] for x in inputs]
    o, after = npu_ops.chunk_gated_delta_rule(
        *inputs,
        scale=scale,
        initial_state=None if initial_state is None else initial_state.float(),
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )
    return (o if q.shape[0] > 1 else padded(o[0], tokens)[None]), after
