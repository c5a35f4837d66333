"""The chunked gated delta rule in Triton, for Ascend and NVIDIA. Reference: reference.py

The forward has three steps. The first lays out gates by chunk (chunks.py). The second computes how
tokens of one chunk act on each other (intra.py). The third loops over the chunks of each sequence,
and keeps the state and the values that tokens write to it on chip (forward.py). A few long
sequences are cut into segments that run in parallel (segments.py). Backward: backward.py.
"""

from __future__ import annotations

import torch

from npu_ops.core import env, hardware
from npu_ops.core.grid import cdiv, vector_grid
from npu_ops.core.lengths_triton_ascend import finish, int32_starts
from npu_ops.ops.chunk_gated_delta_rule import token_by_token
from npu_ops.ops.chunk_gated_delta_rule.arguments import TOKEN
from npu_ops.ops.chunk_gated_delta_rule.reference import EPS
from npu_ops.ops.chunk_gated_delta_rule.triton_ascend import (
    backward,
    chunks,
    forward,
    intra,
    plan,
    segments,
)
from npu_ops.ops.chunk_gated_delta_rule.triton_ascend.plan import ROOM
from npu_ops.ops.gated_delta_rule_update.triton_ascend import gated_delta_rule_update
from npu_ops.ops.l2norm import triton_ascend as norm

# A sequence is cut only into at least FEWEST_SEGMENTS segments of at least SEGMENT chunks each.
# With fewer segments, computing every segment twice would not pay off. With shorter ones, the two
# additional launches would not (docs/npu-model.md).
FEWEST_SEGMENTS = 4
SEGMENT = 16
# Largest K whose K by K matrix is multiplied as one tile.
WIDEST_MOVE = 128
# Bytes on each vector core for the rows of states that gradients_kernel multiplies at a time; half
# of it if a token's row of values has more than 256 bytes.
PRODUCT_BYTES = 16 * 1024
# Rows of a state, and of its gradient, that inner_products_kernel multiplies at a time.
ROWS = 32


@ROOM.found_for
def chunk_gated_delta_rule(
    q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size, state_v_first, normalize,
    o, final_state, chunk_states=None,
):  # fmt: skip
    """Write o, and final_state and chunk_states unless they are None.

    Arguments as in the operator.
    """
    if chunk_size == TOKEN:
        step = gated_delta_rule_update
        inputs = q, k, v, g, beta, initial_state, cu_seqlens, scale, state_v_first, normalize
        token_by_token.forward(step, *inputs, o, final_state)
        return finish(int32_starts(cu_seqlens), o, states=(final_state,))
    wanted = chunk_size  # chunk_states has a state before every chunk of this size
    chunk_size = plan.chunk_size_of(q, v, chunk_size)
    spans = chunks.chunks_of(q, cu_seqlens, chunk_size)
    gates = chunks.gather(g, beta, spans, chunk_size)
    solved, scores, *norms = _within_chunks(q, k, gates, spans, scale, normalize, weighed=True)
    # kept.firsts is the first row of each sequence in chunk_states.
    kept = None if chunk_states is None else chunks.chunks_of(q, cu_seqlens, wanted)
    number, last = _segments(q, v, spans.sequences, chunk_size), final_state
    if number > 1:
        whole = _whole(q, v, state_v_first, chunk_size)
        unit = max(wanted, chunk_size)
        spans = segments.cut(spans, number, chunk_size, unit)
        kept = None if kept is None else segments.cut(kept, number, wanted, unit)
        initial_state = segments.states_before(
            k, v, gates[0], None, solved, norms[1], initial_state, spans, number, whole,
            plan.FEWEST_COLUMNS,
        )  # fmt: skip
        last = None if final_state is None else torch.empty_like(initial_state)
    for walk in plan.walks_of(q, v, spans.sequences, state_v_first, chunk_size):
        forward.forward_kernel[walk.grid](
            q, k, v, gates[0], solved, scores, *norms, initial_state, spans.starts, spans.firsts, o,
            last, chunk_states, None if kept is None else kept.firsts, None, None, scale,
            walk.piece, walk.end, KEEP=wanted, **walk.constants,
        )  # fmt: skip
    if last is not final_state:
        final_state.copy_(last[number - 1 :: number])
    finish(int32_starts(cu_seqlens), o, states=(final_state, chunk_states))


chunk_gated_delta_rule_prefill = chunk_gated_delta_rule


@ROOM.found_for
def chunk_gated_delta_rule_backward(
    grad_o, grad_final_state, q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size,
    state_v_first, normalize, grad_q, grad_k, grad_v, grad_g, grad_beta, grad_initial_state,
):  # fmt: skip
    """Write the gradients; grad_initial_state may be None. Arguments as in the operator."""
    chunk_size = plan.chunk_size_of(q, v, token_by_token.chunk_size_of_backward(chunk_size))
    spans = chunks.chunks_of(q, cu_seqlens, chunk_size)
    gates = chunks.gather(g, beta, spans, chunk_size)
    solved, scores, *norms = _within_chunks(q, k, gates, spans, scale, normalize, weighed=False)
    number, first = _segments(q, v, spans.sequences, chunk_size), grad_initial_state
    if number > 1:
        whole = _whole(q, v, state_v_first, chunk_size)
        spans = segments.cut(spans, number, chunk_size, chunk_size)
        initial_state = segments.states_before(
            k, v, *gates, solved, norms[1], initial_state, spans, number, whole, plan.FEWEST_COLUMNS
        )
        grad_final_state = segments.gradients_after(
            grad_o, grad_final_state, q, k, gates, solved, scores, norms, spans, number, scale,
            whole, plan.FEWEST_COLUMNS,
        )  # fmt: skip
        first = None if first is None else torch.empty_like(initial_state)
    walks = plan.walks_of(q, v, spans.sequences, state_v_first, chunk_size)
    per_chunk = (spans.number, v.shape[2], q.shape[3], v.shape[3])
    states, grad_states = solved.new_empty(per_chunk), solved.new_empty(per_chunk)
    written, grad_wanted = (torch.empty_like(v, dtype=solved.dtype) for _ in range(2))
    for walk in walks:
        backward.states_kernel[walk.grid](
            k, v, *gates, solved, norms[1], initial_state, spans.starts, spans.firsts, states,
            written, None, None, 1.0, walk.piece, walk.end, **walk.constants,
        )  # fmt: skip
    blocks = max(cdiv(v.shape[3], walk.constants["BV"]) for walk in walks)
    # Zeros, because the launch with wider blocks of columns writes fewer blocks.
    new = gates[0].new_empty if len(walks) == 1 else gates[0].new_zeros
    of_values = new((blocks, *gates[0].shape))
    for walk in walks:
        backward.state_gradients_kernel[walk.grid](
            grad_o, grad_final_state, q, k, v, *gates, solved, scores, *norms, spans.starts,
            spans.firsts, grad_states, grad_wanted, grad_v, of_values, first, None, None, scale,
            spans.number, walk.piece, walk.end, **walk.constants,
        )  # fmt: skip
    if first is not grad_initial_state:
        grad_initial_state.copy_(first[::number])
    del solved, scores
    grad_g_sums, kept_sums, grad_betas = _gradients(
        grad_o, q, k, v, gates, norms, spans, states, written, grad_states, grad_wanted, grad_q,
        grad_k, scale, chunk_size,
    )  # fmt: skip
    totals = _inner_products(states, grad_states, gates[0])
    grad_betas = grad_betas + chunks.summed(of_values)
    chunks.scatter(grad_g_sums, kept_sums, totals, grad_betas, spans, grad_g, grad_beta)
    finish(
        int32_starts(cu_seqlens), grad_q, grad_k, grad_v, grad_g, grad_beta,
        states=(grad_initial_state,),
    )  # fmt: skip


def _gradients(
    grad_o, q, k, v, gates, norms, spans, states, written, grad_states, grad_wanted, grad_q, grad_k,
    scale, chunk_size,
):  # fmt: skip
    """Write grad_q and grad_k; return inputs of `chunks.scatter`.

    Returns:
        grad_g_sums, kept_sums and grad_betas, by chunk, fp32 `[chunks, HV, C]`.
    """
    values = plan.width_of(v.shape[3], q.device)
    room = ROOM.of(PRODUCT_BYTES) * hardware.cores_of_a_tile(q.device)
    if values * states.element_size() > 256:
        room //= 2
    keys = min(
        plan.width_of(q.shape[3], q.device),
        max(plan.narrowest(q.device), room // (states.element_size() * values)),
    )
    blocks = cdiv(q.shape[3], keys)
    grad_g_sums, kept_sums, grad_betas = (
        gates[0].new_empty((blocks, *gates[0].shape)) for _ in range(3)
    )
    grid = plan.cube_grid(spans.number * q.shape[2] * blocks, q.device)
    kernel = backward.gradients_kernel
    kernel[grid](
        grad_o, q, k, *gates, *norms, spans.spans, states, written, grad_states, grad_wanted,
        grad_q, grad_k, grad_g_sums, kept_sums, grad_betas, scale, spans.number, H=q.shape[2],
        HV=v.shape[2], K=q.shape[3], V=v.shape[3], BK=keys, BV=values, C=chunk_size,
        # Double buffering for loads only: two buffers for results of the matrix unit do not fit.
        **hardware.ascend_options(
            kernel, q.device, limit_auto_multi_buffer_only_for_local_buffer=True
        ),
    )  # fmt: skip
    if norms[0] is not None and blocks > 1:
        for gradient, x in ((grad_q, q), (grad_k, k)):
            rows = gradient.flatten(0, 1)
            norm.l2norm_backward(rows, x.flatten(0, 1), EPS, rows)
    return tuple(map(chunks.summed, (grad_g_sums, kept_sums, grad_betas)))


def _inner_products(states, grad_states, g_sums):
    """Return decay * sum(state before * gradient of state after) by chunk, fp32 [chunks, HV]."""
    number, value_heads, keys, values = states.shape
    totals = g_sums.new_empty((number, value_heads))
    backward.inner_products_kernel[vector_grid(totals.numel(), states.device)](
        states, grad_states, g_sums, totals, number, HV=value_heads, K=keys, V=values,
        C=g_sums.shape[2], ROWS=ROWS, BV=plan.width_of(values, states.device),
    )  # fmt: skip
    return totals


def _within_chunks(q, k, gates, spans, scale, normalize: bool, weighed: bool):
    """Compute how tokens of one chunk act on each other: on the matrix unit, then on vector cores.

    weighed: multiply the columns of solved by betas.

    Returns:
        A tuple of four: solved and scores `[chunks, HV, C, C]`; 1 over the norms of q and 1 over
        the norms of k, fp32 `[chunks, H, C]`, both None without `normalize`.
    """
    number, value_heads, size = gates[0].shape
    # fp16 cannot hold the values that a state may grow to, so its products are fp32.
    wide = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
    square = number, value_heads, size, size
    solved, scores = q.new_empty(square, dtype=wide), q.new_empty(square, dtype=wide)
    heads, keys = q.shape[2:]
    norms = [None, None]
    if normalize:
        norms = [gates[0].new_empty((number, heads, size)) for _ in range(2)]
    qk, kk = (gates[0].new_empty((number, heads, size, size)) for _ in range(2))
    intra.products_kernel[plan.cube_grid(number * heads, q.device)](
        q, k, spans.spans, qk, kk, number, H=heads, K=keys, BK=plan.width_of(keys, q.device), C=size
    )
    kernel = intra.intra_kernel
    kernel[vector_grid(number * heads, q.device)](
        q, k, qk, kk, *gates, spans.spans, solved, scores, *norms, scale, number, EPS, H=heads,
        HV=value_heads, K=keys, C=size, WEIGHED=weighed,
        **hardware.ascend_options(kernel, q.device, SLICES=True),
    )  # fmt: skip
    return solved, scores, *norms


def _segments(q, v, sequences: int, size: int) -> int:
    """Return the number of segments of each sequence; 1 if cutting does not pay off.

    The number keeps all cores busy at once. On a GPU, whose programs share a multiprocessor, the
    effect was never measured, so sequences are not cut. With NPU_OPS_CONSISTENT, sequences are not
    cut either, because the number depends on the other sequences.
    """
    if env.settings.consistent or v.device.type == "cuda" or q.shape[3] > WIDEST_MOVE:
        return 1
    most = plan.most_columns(q, v)
    own, moves = cdiv(v.shape[3], most), cdiv(q.shape[3], most)
    a_head = hardware.num_cube_cores(v.device) // (sequences * v.shape[2])  # cores for each head
    chunks_of_each = q.shape[0] * q.shape[1] // (sequences * size)
    number = min((a_head + moves) // (own + moves) + 1, chunks_of_each // SEGMENT)
    return number if number >= FEWEST_SEGMENTS else 1


def _whole(q, v, state_v_first: bool, size: int) -> dict:
    """Return the constants of the kernels in segments.py, with as many columns as fit on chip."""
    return plan.constants_of(q, v, state_v_first, size) | {"BV": plan.most_columns(q, v)}
