"""Shared by chunk_gated_delta_rule and chunk_kda: runs calls with chunk_size 1 token by token.

Only chunk_gated_delta_rule uses `forward`, which runs the decoding step's kernel. So a token gets
the same bits in a whole prompt, in a part of a prompt, and in a decoding step.
"""

from __future__ import annotations

from npu_ops.core import make
from npu_ops.ops.chunk_gated_delta_rule.arguments import CHUNK_SIZES, TOKEN


def chunk_size_of_backward(size: int) -> int:
    """Return the chunk size of the backward, which never runs token by token."""
    return CHUNK_SIZES[-1] if size == TOKEN else size


def forward(
    step, q, k, v, g, beta, initial_state, cu_seqlens, scale, state_v_first, normalize, o,
    final_state,
):  # fmt: skip
    """Write o, and final_state unless it is None.

    step: an implementation of `gated_delta_rule_update`. Its states always have values first: with
    keys first, its sums would have another order.
    """
    count = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    pool = g.new_zeros(count, *v.shape[2:], q.shape[3])
    if initial_state is not None:
        pool.copy_(initial_state if state_v_first else initial_state.mT)
    step(
        *(x.flatten(0, 1) for x in (q, k, v, g, beta)), None, None, pool,
        make.counted(count, device=q.device), cu_seqlens, None, None, None, scale, normalize, True,
        True, 1.0, 20.0, o.flatten(0, 1),
    )  # fmt: skip
    if final_state is not None:
        final_state.copy_(pool if state_v_first else pool.mT)
