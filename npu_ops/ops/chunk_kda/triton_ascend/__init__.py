"""Kimi Delta Attention in Triton, for Ascend and NVIDIA. Definition: reference.py

Forward: what needs a decay of each key is computed for each chunk by itself (intra.py). The inverse
of a chunk's triangular matrix and the walk through the chunks of a sequence are the gated delta
rule's kernels. The backward goes token by token, by the recurrent rule's kernels.
"""

from __future__ import annotations

import dataclasses

import torch

from npu_ops.core import hardware
from npu_ops.core.grid import vector_grid
from npu_ops.core.lengths_triton_ascend import finish, int32_starts
from npu_ops.ops.chunk_gated_delta_rule.arguments import TOKEN
from npu_ops.ops.chunk_gated_delta_rule.reference import EPS
from npu_ops.ops.chunk_gated_delta_rule.triton_ascend import chunks, forward, plan
from npu_ops.ops.chunk_gated_delta_rule.triton_ascend.intra import intra_kernel
from npu_ops.ops.chunk_kda.triton_ascend import intra
from npu_ops.ops.fused_recurrent_gated_delta_rule import triton_ascend as recurrent
from npu_ops.ops.l2norm import triton_ascend as norm

# Keys of which pairs_kernel takes the decays at a time.
KEYS = 128


@plan.ROOM.found_for
def chunk_kda(
    q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size, state_v_first, normalize,
    o, final_state,
):  # fmt: skip
    """Write o, and final_state unless it is None; the arguments are the operator's."""
    if chunk_size == TOKEN:
        if normalize:
            q, k = _normalized(q), _normalized(k)
        return recurrent.fused_recurrent_gated_delta_rule(
            q, k, v, None, g, None, beta[..., None], initial_state, cu_seqlens, scale,
            state_v_first, o, final_state,
        )  # fmt: skip
    size = plan.chunk_size_of(q, v, chunk_size)
    spans = chunks.chunks_of(q, cu_seqlens, size)
    tiles, solved, scores = _within_chunks(q, k, g, beta, spans, size, scale, normalize, True)
    for walk in plan.walks_of(q, v, spans.sequences, state_v_first, size):
        forward.forward_kernel[walk.grid](
            tiles.asked, tiles.recalled, v, None, solved, scores, None, None, initial_state,
            spans.starts, spans.firsts, o, final_state, None, None, tiles.kept, tiles.decays, 1.0,
            walk.piece, walk.end, KEEP=size, **walk.constants,
        )  # fmt: skip
    finish(int32_starts(cu_seqlens), o, states=(final_state,))


@dataclasses.dataclass(frozen=True)
class Tiles:
    """What `pairs_kernel` and `totals_kernel` write: q and k times decays, and decays of states."""

    asked: torch.Tensor
    recalled: torch.Tensor
    kept: torch.Tensor
    decays: torch.Tensor


def _within_chunks(q, k, g, beta, spans, size: int, scale, normalize: bool, weighed: bool):
    """What tokens of one chunk do to each other and to a state.

    Returns:
        Tiles; then solved and scores `[chunks, HV, C, C]`. weighed: the columns of solved are
        multiplied by betas.
    """
    _, betas = chunks.gather(None, beta, spans, size)
    number, heads, keys = spans.number, g.shape[2], g.shape[3]
    # fp16 cannot hold what a state may grow to, so its products are fp32.
    wide = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
    rows, square = (number, heads, size, keys), (number, heads, size, size)
    asked, recalled, kept = (q.new_empty(rows, dtype=wide) for _ in range(3))
    tiles = Tiles(asked, recalled, kept, g.new_empty((number, heads, keys)))
    norms = [g.new_empty((number, q.shape[2], size)) if normalize else None for _ in range(2)]
    qk, kk = g.new_empty(square), g.new_empty(square)
    of_heads = {"HV": heads, "K": keys, "C": size, "BK": min(KEYS, plan.width_of(keys, q.device))}
    intra.totals_kernel[vector_grid(number * heads, q.device)](
        g, spans.spans, tiles.decays, number, **of_heads
    )
    intra.pairs_kernel[plan.cube_grid(number * heads, q.device)](
        q, k, g, spans.spans, qk, kk, asked, recalled, kept, *norms, scale, number, EPS,
        H=q.shape[2], LEVELS=size.bit_length() - 1, **of_heads,
    )  # fmt: skip
    solved, scores = q.new_empty(square, dtype=wide), q.new_empty(square, dtype=wide)
    intra_kernel[vector_grid(number * heads, q.device)](
        None, None, qk, kk, None, betas, spans.spans, solved, scores, None, None, 1.0, number, EPS,
        H=heads, HV=heads, K=keys, C=size, WEIGHED=weighed,
        **hardware.ascend_options(intra_kernel, q.device, SLICES=True),
    )  # fmt: skip
    return tiles, solved, scores


def chunk_kda_backward(
    grad_o, grad_final_state, q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size,
    state_v_first, normalize, grad_q, grad_k, grad_v, grad_g, grad_beta, grad_initial_state,
):  # fmt: skip
    """Write the gradients; grad_initial_state may be None. The arguments are the operator's."""
    given = q, k
    if normalize:
        q, k = _normalized(q), _normalized(k)
    of_rows = [torch.empty_like(x, dtype=torch.float32) for x in (q, k)]
    recurrent.fused_recurrent_gated_delta_rule_backward(
        grad_o, grad_final_state, q, k, v, None, g, None, beta[..., None], initial_state,
        cu_seqlens, scale, state_v_first, *of_rows, grad_v, None, grad_g, None,
        grad_beta[..., None], grad_initial_state,
    )  # fmt: skip
    for gradient, found, x in zip((grad_q, grad_k), of_rows, given, strict=True):
        if normalize:
            norm.l2norm_backward(found.flatten(0, 1), x.flatten(0, 1), EPS, gradient.flatten(0, 1))
        else:
            gradient.copy_(found)
    finish(int32_starts(cu_seqlens), grad_q, grad_k)  # rows of nobody: 0, whatever x is there


def _normalized(x):
    """Rows of q or k over their norms, in fp32."""
    out = torch.empty_like(x, dtype=torch.float32)
    norm.l2norm(x.flatten(0, 1), EPS, out.flatten(0, 1))
    return out
