"""Shared by mrope and qk_norm_rope: mrope in Triton, for Ascend and NVIDIA.

Reference: reference.py

The kernel works as in rope/triton_ascend.py, but it merges a tile's coefficients on chip from the
table rows of three axes, T, H and W. qk_norm_rope uses `load_merged` and `load_axis`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from npu_ops.core.grid import cdiv, vector_grid
from npu_ops.ops.rope.triton_ascend import (
    load_row,
    rotate_heads,
    sizes,
    tile_constants,
    token_strides,
    with_direction,
)


@triton.jit
def _merge(t, h, w, H_END: tl.constexpr, W_END: tl.constexpr, T_PAIRS: tl.constexpr,
           H_PAIRS: tl.constexpr, SECTIONS_INTERLEAVED: tl.constexpr, P: tl.constexpr):  # fmt: skip
    """Choose each pair's entry from the axis that its frequency belongs to; all [BT, P]."""
    j = tl.arange(0, P)[None, :]
    if SECTIONS_INTERLEAVED:
        phase = j - (j // 3) * 3  # Ascend computes % on the scalar unit
        is_h = (phase == 1) & (j < H_END)
        is_w = (phase == 2) & (j < W_END)
    else:
        is_h = (j >= T_PAIRS) & (j < T_PAIRS + H_PAIRS)
        is_w = j >= T_PAIRS + H_PAIRS
    return tl.where(is_w, w, tl.where(is_h, h, t))


@triton.jit
def load_axis(table, positions, axis, token, b, rows, length, table_a, table_b, table_s, pos_a,
               pos_b, pos_s, P: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
               FULL: tl.constexpr, INDEXED: tl.constexpr, BT: tl.constexpr):  # fmt: skip
    """Load the table entries of one axis, in the form of `load_row`.

    token: int32 [BT, 1], or a scalar if INDEXED. It is int32 because Ascend compares int64 on the
    scalar unit.
    """
    if INDEXED:
        place = positions + axis * pos_a + b * pos_b + token.to(tl.int64) * pos_s
        row = tl.load(place).to(tl.int64)
        exists = (row >= 0) & (row < rows)
        row = tl.where(exists, row, 0)
    else:
        row = token.to(tl.int64)
        exists = token < length
    at = table + axis * table_a + b * table_b + row * table_s
    return load_row(at, exists, P, PAIRS, INTERLEAVED, FULL, BT)


@triton.jit
def load_merged(table, positions, token, b, rows, length, table_a, table_b, table_s, pos_a, pos_b,
                 pos_s, P: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
                 FULL: tl.constexpr, INDEXED: tl.constexpr, BT: tl.constexpr,
                 T_PAIRS: tl.constexpr, H_PAIRS: tl.constexpr, W_PAIRS: tl.constexpr,
                 SECTIONS_INTERLEAVED: tl.constexpr):  # fmt: skip
    """Load a tile's merged entries for the first and the second of each pair."""
    t1, t2 = load_axis(table, positions, 0, token, b, rows, length, table_a, table_b, table_s,
                        pos_a, pos_b, pos_s, P, PAIRS, INTERLEAVED, FULL, INDEXED, BT)  # fmt: skip
    h1, h2 = load_axis(table, positions, 1, token, b, rows, length, table_a, table_b, table_s,
                        pos_a, pos_b, pos_s, P, PAIRS, INTERLEAVED, FULL, INDEXED, BT)  # fmt: skip
    w1, w2 = load_axis(table, positions, 2, token, b, rows, length, table_a, table_b, table_s,
                        pos_a, pos_b, pos_s, P, PAIRS, INTERLEAVED, FULL, INDEXED, BT)  # fmt: skip
    first = _merge(t1, h1, w1, 3 * H_PAIRS, 3 * W_PAIRS, T_PAIRS, H_PAIRS, SECTIONS_INTERLEAVED, P)
    second = _merge(t2, h2, w2, 3 * H_PAIRS, 3 * W_PAIRS, T_PAIRS, H_PAIRS, SECTIONS_INTERLEAVED, P)
    return first, second


@triton.jit(do_not_specialize=["batch", "length", "rows"])
def _mrope_kernel(
    q, k, cos, sin, positions, q_out, k_out, batch, length, rows,
    q_b, q_s, q_n, k_b, k_s, k_n, qo_b, qo_s, qo_n, ko_b, ko_s, ko_n,
    cos_a, cos_b, cos_s, sin_a, sin_b, sin_s, pos_a, pos_b, pos_s,
    P: tl.constexpr, PAIRS: tl.constexpr, TAIL: tl.constexpr, INTERLEAVED: tl.constexpr,
    FULL: tl.constexpr, INVERSE: tl.constexpr, INDEXED: tl.constexpr,
    T_PAIRS: tl.constexpr, H_PAIRS: tl.constexpr, W_PAIRS: tl.constexpr,
    SECTIONS_INTERLEAVED: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
    BT: tl.constexpr, BHQ: tl.constexpr, BHK: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(length, BT)
    for item in range(tl.program_id(0), batch * tiles, tl.num_programs(0)):
        b = (item // tiles).to(tl.int64)
        start = (item % tiles) * BT
        if INDEXED:  # BT is 1
            place = start
        else:
            place = start + tl.arange(0, BT)[:, None]
        cos1, cos2 = load_merged(
            cos, positions, place, b, rows, length, cos_a, cos_b, cos_s, pos_a, pos_b, pos_s,
            P, PAIRS, INTERLEAVED, FULL, INDEXED, BT, T_PAIRS, H_PAIRS, W_PAIRS,
            SECTIONS_INTERLEAVED,
        )  # fmt: skip
        sin1, sin2 = load_merged(
            sin, positions, place, b, rows, length, sin_a, sin_b, sin_s, pos_a, pos_b, pos_s,
            P, PAIRS, INTERLEAVED, FULL, INDEXED, BT, T_PAIRS, H_PAIRS, W_PAIRS,
            SECTIONS_INTERLEAVED,
        )  # fmt: skip
        cos1, cos2, across1, across2 = with_direction(cos1, cos2, sin1, sin2, INVERSE)
        token = start + tl.arange(0, BT)[:, None, None]
        at, inside = token.to(tl.int64), token < length
        rotate_heads(q, q_out, b * q_b + at * q_s, b * qo_b + at * qo_s, q_n, qo_n, inside, Q_HEADS,
                     cos1, cos2, across1, across2, P, PAIRS, TAIL, INTERLEAVED, BT,
                     BHQ)  # fmt: skip
        rotate_heads(k, k_out, b * k_b + at * k_s, b * ko_b + at * ko_s, k_n, ko_n, inside, K_HEADS,
                     cos1, cos2, across1, across2, P, PAIRS, TAIL, INTERLEAVED, BT,
                     BHK)  # fmt: skip


def mrope(
    q, k, cos, sin, positions, mrope_section, section_layout, layout, pair_layout, inverse,
    rotary_dim, q_out, k_out,
):  # fmt: skip
    """Rotate q into q_out and k into k_out. Arguments as in the operator."""
    batch, length = sizes(q, layout)
    strides = [token_strides(x, layout) for x in (q, k, q_out, k_out)]
    tables = [_strides(table) for table in (cos, sin)]
    places = (0, 0, 0) if positions is None else _strides(positions)
    full = cos.shape[-1] == rotary_dim
    constants = tile_constants(
        q, k, layout, pair_layout, rotary_dim, q_out, full, positions is not None
    )
    items = batch * cdiv(length, constants["BT"])
    t, h, w = mrope_section
    _mrope_kernel[vector_grid(items, q.device)](
        q, k, cos, sin, positions, q_out, k_out, batch, length, cos.shape[2],
        *(stride for three in strides for stride in three),
        *tables[0], *tables[1], *places, FULL=full, INVERSE=inverse,
        INDEXED=positions is not None, T_PAIRS=t, H_PAIRS=h, W_PAIRS=w,
        SECTIONS_INTERLEAVED=section_layout == "interleaved", **constants,
    )  # fmt: skip


def _strides(x):
    """Return the strides of axis, batch and row; 0 for a dimension of size 1, which is shared."""
    return tuple(0 if x.shape[i] == 1 else x.stride(i) for i in (0, 1)) + (x.stride(2),)
