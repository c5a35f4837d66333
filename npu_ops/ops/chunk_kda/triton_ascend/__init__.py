"""Kimi Delta Attention in Triton, for Ascend and NVIDIA. Reference: reference.py

Forward: `pairs_kernel` applies the decays of each key, chunk by chunk (intra.py). The kernels of
`chunk_gated_delta_rule` invert a chunk's triangular matrix and loop over the chunks of a sequence.
In the backward, they also run these loops; backward.py has the other kernels.
"""

from __future__ import annotations

import dataclasses

import torch

from npu_ops.core import hardware
from npu_ops.core.grid import cdiv, vector_grid
from npu_ops.core.lengths_triton_ascend import finish, int32_starts
from npu_ops.core.room import Room
from npu_ops.ops.chunk_gated_delta_rule import token_by_token
from npu_ops.ops.chunk_gated_delta_rule.arguments import TOKEN
from npu_ops.ops.chunk_gated_delta_rule.reference import EPS
from npu_ops.ops.chunk_gated_delta_rule.triton_ascend import backward as shared
from npu_ops.ops.chunk_gated_delta_rule.triton_ascend import chunks, forward, plan
from npu_ops.ops.chunk_gated_delta_rule.triton_ascend.intra import intra_kernel
from npu_ops.ops.chunk_kda.triton_ascend import backward, intra
from npu_ops.ops.fused_recurrent_gated_delta_rule import triton_ascend as recurrent
from npu_ops.ops.l2norm import triton_ascend as norm

# Number of keys whose decays a kernel processes at a time. With ascendnpu-ir 1.1, only 32 fit in
# the backward (`Room` halves KEYS_BACKWARD then).
KEYS, KEYS_BACKWARD = 128, 64
# Rows of a state, and of its gradient, that inner_products_kernel multiplies at a time.
ROWS = 32
ROOM = Room("chunk_kda")


@plan.ROOM.found_for
def chunk_kda(
    q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size, state_v_first, normalize,
    o, final_state,
):  # fmt: skip
    """Write o, and final_state unless it is None. Arguments as in the operator."""
    if chunk_size == TOKEN:
        if normalize:
            q, k = _normalized(q), _normalized(k)
        return recurrent.fused_recurrent_gated_delta_rule(
            q, k, v, None, g, None, beta[..., None], initial_state, cu_seqlens, scale,
            state_v_first, o, final_state,
        )  # fmt: skip
    size = plan.chunk_size_of(q, v, chunk_size)
    spans = chunks.chunks_of(q, cu_seqlens, size)
    tiles, solved, scores = _within_chunks(q, k, g, beta, spans, size, scale, normalize, True)[:3]
    for walk in plan.walks_of(q, v, spans.sequences, state_v_first, size):
        forward.forward_kernel[walk.grid](
            tiles.asked, tiles.recalled, v, None, solved, scores, None, None, initial_state,
            spans.starts, spans.firsts, o, final_state, None, None, tiles.kept, tiles.decays, 1.0,
            walk.piece, walk.end, KEEP=size, **walk.constants,
        )  # fmt: skip
    finish(int32_starts(cu_seqlens), o, states=(final_state,))


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Outputs of `pairs_kernel` (asked, recalled, kept) and `totals_kernel` (decays), see intra.py.

    asked, recalled, kept: `[chunks, HV, C, K]`. decays: fp32 `[chunks, HV, K]`.
    """

    asked: torch.Tensor
    recalled: torch.Tensor
    kept: torch.Tensor
    decays: torch.Tensor


def _within_chunks(q, k, g, beta, spans, size: int, scale, normalize: bool, weighed: bool):
    """Compute all that depends only on the tokens of one chunk, not on a state.

    weighed: multiply the columns of solved by betas.

    Returns:
        A tuple of seven: `Tiles`; solved, scores and the products of keys `[chunks, HV, C, C]`;
        betas `[chunks, HV, C]`; 1 over the norms of q and 1 over the norms of k `[chunks, H, C]`,
        both None without `normalize`.
    """
    _, betas = chunks.gather(None, beta, spans, size)
    number, heads, keys = spans.number, g.shape[2], g.shape[3]
    # fp16 cannot hold the values that a state may grow to, so its products are fp32.
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
    return tiles, solved, scores, kk, betas, *norms


@plan.ROOM.found_for
def chunk_kda_backward(
    grad_o, grad_final_state, q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size,
    state_v_first, normalize, grad_q, grad_k, grad_v, grad_g, grad_beta, grad_initial_state,
):  # fmt: skip
    """Write the gradients; grad_initial_state may be None. Arguments as in the operator."""
    size = plan.chunk_size_of(q, v, token_by_token.chunk_size_of_backward(chunk_size))
    spans = chunks.chunks_of(q, cu_seqlens, size)
    tiles, solved, scores, kk, betas, *norms = _within_chunks(
        q, k, g, beta, spans, size, scale, normalize, weighed=False
    )
    by_key = tiles.kept, tiles.decays
    walks = plan.walks_of(q, v, spans.sequences, state_v_first, size)
    per_chunk = (spans.number, v.shape[2], q.shape[3], v.shape[3])
    states, grad_states = solved.new_empty(per_chunk), solved.new_empty(per_chunk)
    written, grad_wanted = (torch.empty_like(v, dtype=solved.dtype) for _ in range(2))
    for walk in walks:
        shared.states_kernel[walk.grid](
            tiles.recalled, v, None, betas, solved, None, initial_state, spans.starts, spans.firsts,
            states, written, *by_key, 1.0, walk.piece, walk.end, **walk.constants,
        )  # fmt: skip
    blocks = max(cdiv(v.shape[3], walk.constants["BV"]) for walk in walks)
    # Zeros, because the launch with wider blocks of columns writes fewer blocks.
    new = betas.new_empty if len(walks) == 1 else betas.new_zeros
    of_values = new((blocks, *betas.shape))
    for walk in walks:
        shared.state_gradients_kernel[walk.grid](
            grad_o, grad_final_state, tiles.asked, tiles.recalled, v, None, betas, solved, scores,
            None, None, spans.starts, spans.firsts, grad_states, grad_wanted, grad_v, of_values,
            grad_initial_state, *by_key, 1.0, spans.number, walk.piece, walk.end, **walk.constants,
        )  # fmt: skip
    of_keys = _gradients(
        grad_o, q, k, g, betas, kk, norms, spans, states, written, grad_states, grad_wanted,
        tiles.decays, grad_q, grad_k, grad_g, scale, size,
    )  # fmt: skip
    chunks.scatter(None, None, None, of_keys + chunks.summed(of_values), spans, None, grad_beta)
    finish(
        int32_starts(cu_seqlens), grad_q, grad_k, grad_v, grad_g, grad_beta,
        states=(grad_initial_state,),
    )  # fmt: skip


@ROOM.found_for
def _gradients(
    grad_o, q, k, g, betas, kk, norms, spans, states, written, grad_states, grad_wanted, decays,
    grad_q, grad_k, grad_g, scale, size: int,
):  # fmt: skip
    """Write grad_q, grad_k and grad_g; return the part of betas' gradient that comes from keys.

    That part is fp32 `[chunks, HV, C]`.
    """
    number, heads, keys, values = states.shape
    of_heads = {"HV": heads, "K": keys, "V": values, "BV": plan.width_of(values, q.device)}
    totals = torch.empty_like(decays)
    backward.inner_products_kernel[vector_grid(number * heads, q.device)](
        states, grad_states, decays, totals, number, BK=ROWS, **of_heads
    )
    fits = max(plan.narrowest(q.device), ROOM.of(KEYS_BACKWARD))
    width = min(fits, plan.width_of(keys, q.device))
    blocks = cdiv(keys, width)
    of_keys = betas.new_empty((blocks, *betas.shape))
    backward.gradients_kernel[plan.cube_grid(number * q.shape[2] * blocks, q.device)](
        grad_o, q, k, g, betas, kk, *norms, spans.spans, states, written, grad_states, grad_wanted,
        totals, grad_q, grad_k, grad_g, of_keys, scale, number, H=q.shape[2], BK=width, C=size,
        LEVELS=size.bit_length() - 1, **of_heads,
    )  # fmt: skip
    if norms[0] is not None and blocks > 1:
        for gradient, x in ((grad_q, q), (grad_k, k)):
            rows = gradient.flatten(0, 1)
            norm.l2norm_backward(rows, x.flatten(0, 1), EPS, rows)
    return chunks.summed(of_keys)


def _normalized(x):
    """Return the rows of q or k divided by their norms, fp32."""
    out = torch.empty_like(x, dtype=torch.float32)
    norm.l2norm(x.flatten(0, 1), EPS, out.flatten(0, 1))
    return out
