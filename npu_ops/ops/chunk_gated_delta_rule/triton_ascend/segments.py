"""Long sequences of few heads: their segments are walked side by side, from states that are joined.

What a segment does to a state is affine, `S -> M S + h`, as in context_parallel.py. `ends_kernel`
finds each segment's h, its final state from 0, and M, its final state from the identity with v = 0.
`join_kernel` composes those into the states that segments start from, with which forward.py walks
all of them at once. Each step of a walk waits for the one before: fewer are worth their work twice.
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
)
from npu_ops.ops.chunk_gated_delta_rule.triton_ascend.intra import (
    load_over_norms,
    load_rows,
    load_square,
)


@triton.jit(do_not_specialize=["heads", "segments"])
def ends_kernel(
    k, v, g_sums, solved, over_k, initial_state, starts, firsts, ends, heads, segments,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """ends: h and M of all segments but the last, [sequences, segments - 1, HV, K, V' + K] in fp32,
    V' being V rounded up to whole BV. heads: of all sequences.

    A program takes BV columns through a segment, as in `forward_kernel`. The first segment starts
    from the initial state: its M is not needed, and not written.
    """
    row, key = tl.arange(0, C), tl.arange(0, BK)
    wide = solved.dtype.element_ty
    own: tl.constexpr = (V + BV - 1) // BV
    blocks: tl.constexpr = own + (K + BV - 1) // BV
    WIDTH: tl.constexpr = own * BV + K
    pieces = (segments - 2) * blocks + own  # of a head
    for item in range(tl.program_id(0), heads * pieces, tl.num_programs(0)):
        n, head, piece = item // pieces // HV, item // pieces % HV, item % pieces
        segment = segments - 2 - piece // blocks
        column = piece % blocks * BV
        value = column + tl.arange(0, BV)
        state = tl.where(key[:, None] == (value - own * BV)[None, :], 1.0, 0.0)
        if initial_state is not None:
            none_but_first = tl.where(segment == 0, 0, V)  # which are columns beyond it
            at, exists = state_place(value + none_but_first, K, V, BK, V_FIRST)
            place = tl.cast(n * HV + head, tl.int64) * (K * V)
            first_state = tl.load(initial_state + place + at, mask=exists, other=0.0)
            state += tl.trans(first_state) if V_FIRST else first_state
        begin = tl.load(starts + n * segments + segment)
        stop = tl.load(starts + n * segments + segment + 1)
        chunk = tl.load(firsts + n * segments + segment)
        for first in range(begin, stop, C):
            rows = stop - first
            index = tl.cast(chunk + (first - begin) // C, tl.int64)
            place, shared = index * HV + head, index * H + head // (HV // H)
            b_g, last = tl.load(g_sums + place * C + row), tl.load(g_sums + place * C + C - 1)
            of_k = load_over_norms(over_k, shared, C)
            b_k = load_rows(k, first, rows, H, head // (HV // H), K, BK, C).to(wide)
            b_v = load_rows(v, first, rows, HV, head, V, BV, C, column).to(wide)  # 0 for M
            b_solved = load_square(solved, place, C)
            recalled = tl.dot(b_k, state.to(wide), input_precision="ieee").to(wide)
            written = tl.dot(b_solved, b_v, input_precision="ieee")
            forgets = b_solved.to(tl.float32) * (0.0 - tl.exp(b_g) * of_k)[None, :]
            written = dot_in_two(forgets, recalled, written).to(wide)
            kept = b_k.to(tl.float32) * (tl.exp(last - b_g) * of_k)[:, None]
            added = dot_in_two(kept, written, tl.zeros((BK, BV), tl.float32), True)
            state = state * tl.exp(last) + added
        place = tl.cast((n * (segments - 1) + segment) * HV + head, tl.int64) * (K * WIDTH)
        exists = (key < K)[:, None] & (value < WIDTH)[None, :]
        tl.store(ends + place + key[:, None] * WIDTH + value[None, :], state, mask=exists)


@triton.jit(do_not_specialize=["heads", "segments"])
def join_kernel(
    ends, initial_state, states, heads, segments, HV: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, V_FIRST: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    MOVES: tl.constexpr,
):  # fmt: skip
    """states: the one before each segment, [sequences, segments, HV, ...] as initial_state.

    A program takes BV columns of one head. M is ends' columns from MOVES on.
    """
    key = tl.arange(0, BK)
    blocks: tl.constexpr = (V + BV - 1) // BV
    WIDTH: tl.constexpr = MOVES + K
    for item in range(tl.program_id(0), heads * blocks, tl.num_programs(0)):
        n, head = item // blocks // HV, item // blocks % HV
        value = item % blocks * BV + tl.arange(0, BV)
        at = key[:, None] * WIDTH + value[None, :]
        exists = (key < K)[:, None] & (value < MOVES)[None, :]
        at_move = key[:, None] * WIDTH + (MOVES + key)[None, :]
        moves = (key < K)[:, None] & (key < K)[None, :]
        state = load_state(initial_state, tl.cast(n * HV + head, tl.int64), value, K, V, BK, BV,
                           V_FIRST)  # fmt: skip
        place = tl.cast(n * segments * HV + head, tl.int64)
        store_state(states, state, place, value, K, V, BK, BV, V_FIRST)
        from_ends = ends + tl.cast(n * (segments - 1) * HV + head, tl.int64) * (K * WIDTH)
        state = tl.load(from_ends + at, mask=exists, other=0.0)
        for _ in range(2, segments):
            place += HV
            store_state(states, state, place, value, K, V, BK, BV, V_FIRST)
            from_ends += HV * K * WIDTH
            move = tl.load(from_ends + at_move, mask=moves, other=0.0)
            added = tl.load(from_ends + at, mask=exists, other=0.0)
            state = tl.dot(move, state, input_precision="ieee") + added
        store_state(states, state, place + HV, value, K, V, BK, BV, V_FIRST)


def cut(chunks: Chunks, segments: int, size: int, unit: int) -> Chunks:
    """The same chunks, of `size` tokens, with the segments of each sequence in place of sequences.

    All but the last of a sequence have as many whole `unit` tokens; short ones leave some empty.
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


def states_before(k, v, g_sums, solved, over_k, initial_state, chunks: Chunks, segments: int,
                  constants: dict, joined: int):  # fmt: skip
    """The state before each segment of `chunks`, fp32 [sequences * segments, HV, ...].

    constants: a walk's; joined: how many columns a program composes.
    """
    value_heads, keys, values = v.shape[2], k.shape[3], v.shape[3]
    sequences, width = chunks.sequences // segments, constants["BV"]
    heads, own = sequences * value_heads, cdiv(values, width)
    ends = g_sums.new_empty((sequences, segments - 1, value_heads, keys, own * width + keys))
    cores = hardware.num_cube_cores(v.device)
    pieces = heads * ((segments - 2) * (own + cdiv(keys, width)) + own)
    ends_kernel[(min(pieces, cores),)](
        k, v, g_sums, solved, over_k, initial_state, chunks.starts, chunks.firsts, ends, heads,
        segments, **constants,
    )  # fmt: skip
    matrix = (values, keys) if constants["V_FIRST"] else (keys, values)
    states = g_sums.new_empty((chunks.sequences, value_heads, *matrix))
    rest = {name: constants[name] for name in ("HV", "K", "V", "V_FIRST", "BK")}
    join_kernel[(min(heads * cdiv(values, joined), cores),)](
        ends, initial_state, states, heads, segments, **rest, BV=joined, MOVES=own * width
    )
    return states
