"""Cut a few long sequences into segments that run in parallel.

A segment changes a state by an affine map, `S -> M S + h`, as in context_parallel.py. `ends_kernel`
computes each segment's h, its final state from 0, and M, its final state from the identity with
v = 0. `join_kernel` composes the maps into the initial states of all segments. With these,
forward.py processes all segments at once. In a sequence each chunk waits for the previous chunk.
Segments shorten this chain, which pays off even though each segment is computed twice.

Gradients of states go the opposite way: `gradient_ends_kernel` computes M^T and the gradient from a
segment's own outputs, and the maps are joined from the last segment on.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from npu_ops.core import hardware
from npu_ops.core.grid import cdiv
from npu_ops.ops.chunk_gated_delta_rule.triton_ascend.chunks import Chunks
from npu_ops.ops.chunk_gated_delta_rule.triton_ascend.forward import (
    dot_in_two,
    load_state,
    state_place,
    store_state,
    written_and_added,
)
from npu_ops.ops.chunk_gated_delta_rule.triton_ascend.intra import (
    load_over_norms,
    load_rows,
    load_square,
)


@triton.jit
def first_or_identity(states, place, is_first, value, own: tl.constexpr, K: tl.constexpr,
                      V: tl.constexpr, V_FIRST: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Return the state that a segment starts from, [BK, BV].

    Columns before `own` belong to the state: 0, or `states` if `is_first`.
    Columns from `own` on belong to the transition matrix M: the identity.
    """
    key = tl.arange(0, BK)
    state = tl.where(key[:, None] == (value - own)[None, :], 1.0, 0.0)
    if states is not None:
        # For other segments, shift the columns beyond the state, so that all are masked out.
        none_but_first = tl.where(is_first, 0, V)
        at, exists = state_place(value + none_but_first, K, V, BK, V_FIRST)
        given = tl.load(states + place * (K * V) + at, mask=exists, other=0.0)
        state += tl.trans(given) if V_FIRST else given
    return state


@triton.jit
def store_end(ends, state, place, value, K: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr):
    """Store BV columns of a segment's map, `[K, WIDTH]`: columns of h or of M."""
    key = tl.arange(0, BK)
    exists = (key < K)[:, None] & (value < WIDTH)[None, :]
    at = key[:, None] * WIDTH + value[None, :]
    tl.store(ends + place * (K * WIDTH) + at, state, mask=exists)


@triton.jit(do_not_specialize=["heads", "segments"])
def ends_kernel(
    k, v, g_sums, betas, solved, over_k, initial_state, starts, firsts, ends, heads, segments,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write h and M of all segments but the last.

    ends: fp32 [sequences, segments - 1, HV, K, V' + K]; V' is V rounded up to a multiple of BV.
    heads: number of heads of all sequences. betas: None if the columns of `solved` include them.

    A program takes BV columns through a segment, as in `forward_kernel`. The first segment starts
    from the initial state: its M is not needed, and not written.
    """
    row = tl.arange(0, C)
    wide = solved.dtype.element_ty
    own: tl.constexpr = (V + BV - 1) // BV
    blocks: tl.constexpr = own + (K + BV - 1) // BV
    WIDTH: tl.constexpr = own * BV + K
    pieces = (segments - 2) * blocks + own  # pieces of one head
    for item in range(tl.program_id(0), heads * pieces, tl.num_programs(0)):
        n, head, piece = item // pieces // HV, item // pieces % HV, item % pieces
        segment = segments - 2 - piece // blocks
        column = piece % blocks * BV
        value = column + tl.arange(0, BV)
        state = first_or_identity(initial_state, tl.cast(n * HV + head, tl.int64), segment == 0,
                                  value, own * BV, K, V, V_FIRST, BK)  # fmt: skip
        begin = tl.load(starts + n * segments + segment)
        stop = tl.load(starts + n * segments + segment + 1)
        chunk = tl.load(firsts + n * segments + segment)
        for first in range(begin, stop, C):
            rows = stop - first
            index = tl.cast(chunk + (first - begin) // C, tl.int64)
            place, shared = index * HV + head, index * H + head // (HV // H)
            b_g, last = tl.load(g_sums + place * C + row), tl.load(g_sums + place * C + C - 1)
            of_k = load_over_norms(over_k, shared, C)
            b_solved = load_square(solved, place, C)
            if betas is not None:
                b_solved = b_solved.to(tl.float32) * tl.load(betas + place * C + row)[None, :]
            # For the columns of M, v is 0.
            _, added = written_and_added(
                state.to(wide), k, v, b_solved, b_g, last, of_k, first, rows, head, column, H, HV,
                K, V, BK, BV, C,
            )  # fmt: skip
            state = state * tl.exp(last) + added
        place = tl.cast((n * (segments - 1) + segment) * HV + head, tl.int64)
        store_end(ends, state, place, value, K, WIDTH, BK)


@triton.jit(do_not_specialize=["heads", "segments", "scale"])
def gradient_ends_kernel(
    grad_o, grad_final_state, q, k, g_sums, betas, solved, scores, over_q, over_k, starts, firsts,
    ends, scale, heads, segments, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, V_FIRST: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write M^T and the gradient of the state before each segment, for all segments but the first.

    ends: [sequences, segments - 1, HV, K, V' + K], as in `ends_kernel`; the last segment comes
    first.

    A program takes BV columns back through a segment, as in `state_gradients_kernel`. The last
    segment starts from grad_final_state: its M^T is not needed, and not written.
    """
    row = tl.arange(0, C)
    wide = solved.dtype.element_ty
    own: tl.constexpr = (V + BV - 1) // BV
    blocks: tl.constexpr = own + (K + BV - 1) // BV
    WIDTH: tl.constexpr = own * BV + K
    pieces = (segments - 2) * blocks + own  # pieces of one head
    for item in range(tl.program_id(0), heads * pieces, tl.num_programs(0)):
        n, head, piece = item // pieces // HV, item // pieces % HV, item % pieces
        segment = 1 + piece // blocks
        column = piece % blocks * BV
        value = column + tl.arange(0, BV)
        grad_state = first_or_identity(grad_final_state, tl.cast(n * HV + head, tl.int64),
                                       segment == segments - 1, value, own * BV, K, V, V_FIRST,
                                       BK)  # fmt: skip
        begin = tl.load(starts + n * segments + segment)
        stop = tl.load(starts + n * segments + segment + 1)
        chunks = tl.cdiv(stop - begin, C)
        chunk = tl.load(firsts + n * segments + segment)
        for back in range(0, chunks):
            index = chunks - 1 - back
            first = begin + index * C
            rows = stop - first
            place = tl.cast(chunk + index, tl.int64) * HV + head
            shared = tl.cast(chunk + index, tl.int64) * H + head // (HV // H)
            of_q, of_k = load_over_norms(over_q, shared, C), load_over_norms(over_k, shared, C)
            b_g, b_beta = tl.load(g_sums + place * C + row), tl.load(betas + place * C + row)
            last = tl.load(g_sums + place * C + C - 1)
            b_q = load_rows(q, first, rows, H, head // (HV // H), K, BK, C).to(wide)
            b_k = load_rows(k, first, rows, H, head // (HV // H), K, BK, C).to(wide)
            b_grad_o = load_rows(grad_o, first, rows, HV, head, V, BV, C, column).to(wide)
            gamma = tl.exp(b_g)
            # As in `state_gradients_kernel`, but the gradients of v and betas are not needed, so
            # betas and gates multiply `solved` instead.
            forgets = load_square(solved, place, C).to(tl.float32)
            forgets = forgets * (0.0 - gamma * b_beta * of_k)[None, :]
            faded = forgets * (tl.exp(last - b_g) * of_k)[:, None]
            of_scores = tl.dot(tl.trans(load_square(scores, place, C)), b_grad_o,
                               input_precision="ieee").to(wide)  # fmt: skip
            of_state = tl.dot(b_k, grad_state.to(wide), input_precision="ieee").to(wide)
            recalled = dot_in_two(forgets, of_scores, tl.zeros((C, BV), tl.float32), True)
            recalled = dot_in_two(faded, of_state, recalled, True).to(wide)
            asked = b_grad_o.to(tl.float32) * (gamma * of_q)[:, None] * scale
            more = tl.dot(tl.trans(b_k), recalled, input_precision="ieee")
            more = dot_in_two(tl.trans(b_q), asked, more)
            grad_state = grad_state * tl.exp(last) + more
        place = tl.cast((n * (segments - 1) + segments - 1 - segment) * HV + head, tl.int64)
        store_end(ends, grad_state, place, value, K, WIDTH, BK)


@triton.jit(do_not_specialize=["heads", "segments"])
def join_kernel(
    ends, initial_state, states, heads, segments, HV: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, V_FIRST: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    MOVES: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Compose the maps of segments into states.

    states: the state before each segment, [sequences, segments, HV, ...] like initial_state; with
    BACK the gradient of the state after each segment, from the last segment on.

    A program takes BV columns of one head. M is in the columns of `ends` from MOVES on.
    """
    key = tl.arange(0, BK)
    blocks: tl.constexpr = (V + BV - 1) // BV
    WIDTH: tl.constexpr = MOVES + K
    step: tl.constexpr = -HV if BACK else HV
    for item in range(tl.program_id(0), heads * blocks, tl.num_programs(0)):
        n, head = item // blocks // HV, item // blocks % HV
        value = item % blocks * BV + tl.arange(0, BV)
        at = key[:, None] * WIDTH + value[None, :]
        exists = (key < K)[:, None] & (value < MOVES)[None, :]
        at_move = key[:, None] * WIDTH + (MOVES + key)[None, :]
        moves = (key < K)[:, None] & (key < K)[None, :]
        state = load_state(initial_state, tl.cast(n * HV + head, tl.int64), value, K, V, BK, BV,
                           V_FIRST)  # fmt: skip
        place = tl.cast((n * segments + (segments - 1 if BACK else 0)) * HV + head, tl.int64)
        store_state(states, state, place, value, K, V, BK, BV, V_FIRST)
        from_ends = ends + tl.cast(n * (segments - 1) * HV + head, tl.int64) * (K * WIDTH)
        state = tl.load(from_ends + at, mask=exists, other=0.0)
        for _ in range(2, segments):
            place += step
            store_state(states, state, place, value, K, V, BK, BV, V_FIRST)
            from_ends += HV * K * WIDTH
            move = tl.load(from_ends + at_move, mask=moves, other=0.0)
            added = tl.load(from_ends + at, mask=exists, other=0.0)
            state = tl.dot(move, state, input_precision="ieee") + added
        store_state(states, state, place + step, value, K, V, BK, BV, V_FIRST)


def cut(chunks: Chunks, segments: int, size: int, unit: int) -> Chunks:
    """Return the same chunks, of `size` tokens, with each segment as a sequence of its own.

    All segments of a sequence but the last have the same number of tokens, a multiple of `unit`. In
    short sequences some segments are empty.
    """
    lengths = chunks.starts.diff()
    most = (lengths + (segments * unit - 1)) // (segments * unit) * unit
    index = torch.arange(segments, device=lengths.device, dtype=torch.int32)
    before = torch.minimum(index * most[:, None], lengths[:, None])
    starts = (chunks.starts[:-1, None] + before).flatten()
    return dataclasses.replace(
        chunks,
        sequences=chunks.sequences * segments,
        starts=torch.cat((starts, chunks.starts[-1:])),
        firsts=(chunks.firsts[:, None] + before // size).flatten(),
    )


def states_before(k, v, g_sums, betas, solved, over_k, initial_state, chunks: Chunks, segments: int,
                  constants: dict, joined: int):  # fmt: skip
    """Return the state before each segment of `chunks`, fp32 [sequences * segments, HV, ...].

    betas: None if `solved` includes them. constants: compile-time constants, as of a `plan.Walk`.
    joined: number of columns that a program of `join_kernel` composes.
    """
    ends, pieces = _ends(chunks, segments, v.device, constants)
    ends_kernel[(pieces,)](
        k, v, g_sums, betas, solved, over_k, initial_state, chunks.starts, chunks.firsts, ends,
        ends.shape[0] * v.shape[2], segments, **constants,
    )  # fmt: skip
    return _join(ends, initial_state, constants, joined, back=False)


def gradients_after(grad_o, grad_final_state, q, k, gates, solved, scores, norms, chunks: Chunks,
                    segments: int, scale, constants: dict, joined: int):  # fmt: skip
    """Return the gradient of the state after each segment; arguments as in `states_before`."""
    ends, pieces = _ends(chunks, segments, q.device, constants)
    gradient_ends_kernel[(pieces,)](
        grad_o, grad_final_state, q, k, *gates, solved, scores, *norms, chunks.starts,
        chunks.firsts, ends, scale, ends.shape[0] * grad_o.shape[2], segments, **constants,
    )  # fmt: skip
    return _join(ends, grad_final_state, constants, joined, back=True)


def _ends(chunks: Chunks, segments: int, device, constants: dict):
    """Return uninitialised memory for the segments' maps, and the number of programs to launch."""
    heads, keys, width = constants["HV"], constants["K"], constants["BV"]
    own, sequences = cdiv(constants["V"], width), chunks.sequences // segments
    shape = sequences, segments - 1, heads, keys, own * width + keys
    pieces = sequences * heads * ((segments - 2) * (own + cdiv(keys, width)) + own)
    programs = min(pieces, hardware.num_cube_cores(device))
    return torch.empty(shape, dtype=torch.float32, device=device), programs


def _join(ends, initial_state, constants: dict, joined: int, back: bool):
    """Return the states between segments, composed from the segments' maps."""
    sequences, segments, heads, keys, width = ends.shape[0], ends.shape[1] + 1, *ends.shape[2:]
    values = constants["V"]
    matrix = (values, keys) if constants["V_FIRST"] else (keys, values)
    states = ends.new_empty((sequences * segments, heads, *matrix))
    programs = min(sequences * heads * cdiv(values, joined), hardware.num_cube_cores(ends.device))
    rest = {name: constants[name] for name in ("HV", "K", "V", "V_FIRST", "BK")}
    join_kernel[(programs,)](
        ends, initial_state, states, sequences * heads, segments, **rest, BV=joined,
        MOVES=width - keys, BACK=back,
    )  # fmt: skip
    return states
