"""qk_norm_rope in Triton, for Ascend and NVIDIA. Reference: reference.py

A program loops over tiles of tokens. It loads a tile's coefficients once, and normalises and
rotates all heads of q and of k with them. A tile is [BT tokens, BH heads]. A head has three parts:
the first and the second elements of its pairs, [P] each, and the tail that is not rotated, [BD].

If the tail, rounded up to a power of 2, is as long as the head (192 of 256 elements: 256), the
kernels load the whole head as the tail, without a mask. Before each masked load, Ascend's compiler
fills the buffer with zeros, and no load overlaps with computation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from npu_ops.core import hardware, socs
from npu_ops.core.grid import cdiv, next_power_of_2, tile_elements, vector_grid
from npu_ops.ops.mrope.triton_ascend import load_axis, load_merged
from npu_ops.ops.rope.triton_ascend import NARROWEST, TABLE_PAIRS, with_direction

# Whether pairs are interleaved -> elements in a tile, from the bytes that the vendor's compiler
# reserves on chip per element (fp32). Splitting interleaved pairs takes more memory.
TILE = {False: tile_elements(48), True: tile_elements(96)}
# Maximum number of tokens in a tile. The coefficients of three axes are on chip, too. With more
# than one token, the compiler copies them for every head, which does not fit in the backward.
TOKENS, BACKWARD_TOKENS = 4, 1
# Maximum number of pieces into which the tokens are cut to sum over them.
PIECES = 48


@triton.jit
def _load_head(x, exists, P: tl.constexpr, PAIRS: tl.constexpr, BD: tl.constexpr,
               TAIL: tl.constexpr, INTERLEAVED: tl.constexpr, BT: tl.constexpr,
               BH: tl.constexpr):  # fmt: skip
    """Load heads `[BT, BH, ..]` as fp32: first elements of pairs, second elements, and the tail.

    The tail is the part of a head that is not rotated, or the whole head; it is meaningless if
    TAIL is 0. Masked elements are 0.
    """
    if INTERLEAVED:  # one contiguous load, split on chip: strided loads are slow
        e = tl.arange(0, 2 * P)[None, None, :]
        both = tl.load(x + e, mask=exists & (e < 2 * PAIRS), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, (BT, BH, P, 2)))
    else:
        j = tl.arange(0, P)[None, None, :]
        mask = exists & (j < PAIRS)
        first = tl.load(x + j, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(x + j + PAIRS, mask=mask, other=0.0).to(tl.float32)
    tail = first
    if TAIL > 0:
        d = tl.arange(0, BD)[None, None, :]
        if BD == 2 * PAIRS + TAIL:
            tail = tl.load(x + d, mask=exists, other=0.0).to(tl.float32)
        else:
            tail = tl.load(x + 2 * PAIRS + d, mask=exists & (d < TAIL), other=0.0).to(tl.float32)
    return first, second, tail


@triton.jit
def _store_head(out, first, second, tail, exists, P: tl.constexpr, PAIRS: tl.constexpr,
                BD: tl.constexpr, TAIL: tl.constexpr, INTERLEAVED: tl.constexpr, BT: tl.constexpr,
                BH: tl.constexpr):  # fmt: skip
    dtype = out.dtype.element_ty
    if INTERLEAVED:
        e = tl.arange(0, 2 * P)[None, None, :]
        both = tl.reshape(tl.join(first, second), (BT, BH, 2 * P))
        tl.store(out + e, both.to(dtype), mask=exists & (e < 2 * PAIRS))
    else:
        j = tl.arange(0, P)[None, None, :]
        mask = exists & (j < PAIRS)
        tl.store(out + j, first.to(dtype), mask=mask)
        tl.store(out + j + PAIRS, second.to(dtype), mask=mask)
    if TAIL > 0:
        d = tl.arange(0, BD)[None, None, :]
        if BD == 2 * PAIRS + TAIL:
            tl.store(out + d, tail.to(dtype), mask=exists & (d >= 2 * PAIRS))
        else:
            tl.store(out + 2 * PAIRS + d, tail.to(dtype), mask=exists & (d < TAIL))


@triton.jit
def _multipliers(weight, P: tl.constexpr, PAIRS: tl.constexpr, BD: tl.constexpr,
                 TAIL: tl.constexpr, INTERLEAVED: tl.constexpr,
                 ZERO_CENTERED: tl.constexpr):  # fmt: skip
    """Load the norm's weight, or 1 + weight, in the layout of `_load_head`.

    Where a tail is the whole head, its elements that are rotated have weight 0.
    """
    first, second, tail = _load_head(
        weight, tl.full((1, 1, 1), True, tl.int1), P, PAIRS, BD, TAIL, INTERLEAVED, 1, 1
    )
    if ZERO_CENTERED:
        first, second, tail = first + 1.0, second + 1.0, tail + 1.0
    if BD == 2 * PAIRS + TAIL:
        tail = tl.where(tl.arange(0, BD)[None, None, :] >= 2 * PAIRS, tail, 0.0)
    return first, second, tail


@triton.jit
def _reciprocal_rms(first, second, tail, eps, D: tl.constexpr, BD: tl.constexpr,
                    TAIL: tl.constexpr):  # fmt: skip
    """Return 1 / RMS of each head, `[BT, BH, 1]`."""
    if TAIL > 0 and BD == D:
        squares = tl.sum(tail * tail, axis=2)
    else:
        squares = tl.sum(first * first + second * second, axis=2)
        if TAIL > 0:
            squares += tl.sum(tail * tail, axis=2)
    return (1.0 / tl.sqrt(squares / D + eps))[:, :, None]


@triton.jit
def _coefficients(
    cos, sin, positions, start, b, rows, length, cos_a, cos_b, cos_s, sin_a, sin_b, sin_s,
    pos_a, pos_b, pos_s, P: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    FULL: tl.constexpr, INDEXED: tl.constexpr, INVERSE: tl.constexpr, BT: tl.constexpr,
    SECTIONS: tl.constexpr, T_PAIRS: tl.constexpr, H_PAIRS: tl.constexpr, W_PAIRS: tl.constexpr,
    SECTIONS_INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Load a tile's coefficients, in the form of `with_direction`."""
    if INDEXED:  # BT is 1
        place = start
    else:
        place = start + tl.arange(0, BT)[:, None]
    if SECTIONS:
        cos1, cos2 = load_merged(
            cos, positions, place, b, rows, length, cos_a, cos_b, cos_s, pos_a, pos_b, pos_s, P,
            PAIRS, INTERLEAVED, FULL, INDEXED, BT, T_PAIRS, H_PAIRS, W_PAIRS, SECTIONS_INTERLEAVED,
        )  # fmt: skip
        sin1, sin2 = load_merged(
            sin, positions, place, b, rows, length, sin_a, sin_b, sin_s, pos_a, pos_b, pos_s, P,
            PAIRS, INTERLEAVED, FULL, INDEXED, BT, T_PAIRS, H_PAIRS, W_PAIRS, SECTIONS_INTERLEAVED,
        )  # fmt: skip
    else:
        cos1, cos2 = load_axis(
            cos, positions, 0, place, b, rows, length, cos_a, cos_b, cos_s, pos_a, pos_b, pos_s, P,
            PAIRS, INTERLEAVED, FULL, INDEXED, BT,
        )  # fmt: skip
        sin1, sin2 = load_axis(
            sin, positions, 0, place, b, rows, length, sin_a, sin_b, sin_s, pos_a, pos_b, pos_s, P,
            PAIRS, INTERLEAVED, FULL, INDEXED, BT,
        )  # fmt: skip
    return with_direction(cos1, cos2, sin1, sin2, INVERSE)


@triton.jit
def _copy_heads(x, out, x_row, out_row, x_head, out_head, inside, HEADS: tl.constexpr,
                D: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """Copy all heads of a tile of tokens."""
    for first_head in range(0, HEADS, BH):
        head = first_head + tl.arange(0, BH)[None, :, None]
        c = tl.arange(0, BC)[None, None, :]
        mask = inside & (head < HEADS) & (c < D)
        at = head.to(tl.int64)
        value = tl.load(x + x_row + at * x_head + c, mask=mask, other=0.0)
        tl.store(out + out_row + at * out_head + c, value, mask=mask)


@triton.jit
def _clear_heads(out, out_row, out_head, inside, HEADS: tl.constexpr, D: tl.constexpr,
                 BT: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """Write zeros to all heads of a tile of tokens."""
    for first_head in range(0, HEADS, BH):
        head = first_head + tl.arange(0, BH)[None, :, None]
        c = tl.arange(0, BC)[None, None, :]
        zeros = tl.zeros((BT, BH, BC), out.dtype.element_ty)
        at = out + out_row + head.to(tl.int64) * out_head + c
        tl.store(at, zeros, mask=inside & (head < HEADS) & (c < D))


@triton.jit
def _heads_forward(
    x, out, x_row, out_row, x_head, out_head, inside, cos1, cos2, across1, across2, w3, eps,
    HEADS: tl.constexpr, D: tl.constexpr, P: tl.constexpr, PAIRS: tl.constexpr, BD: tl.constexpr,
    TAIL: tl.constexpr, INTERLEAVED: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate every head of a tile of tokens.

    The coefficients include the norm's weights; w3 is the weight of the tail.
    x_row, out_row: where each token starts, int64 [BT, 1, 1]; inside: whether it exists.
    """
    for first_head in range(0, HEADS, BH):
        head = first_head + tl.arange(0, BH)[None, :, None]
        exists = inside & (head < HEADS)
        at = head.to(tl.int64)
        x1, x2, x3 = _load_head(
            x + x_row + at * x_head, exists, P, PAIRS, BD, TAIL, INTERLEAVED, BT, BH
        )
        r = _reciprocal_rms(x1, x2, x3, eps, D, BD, TAIL)
        y1, y2, y3 = x1 * cos1 + x2 * across1, x2 * cos2 + x1 * across2, x3
        if TAIL > 0:
            y3 = x3 * w3 * r
        _store_head(out + out_row + at * out_head, y1 * r, y2 * r, y3, exists, P, PAIRS, BD, TAIL,
                    INTERLEAVED, BT, BH)  # fmt: skip


@triton.jit
def _heads_backward(
    grad, x, out, grad_row, x_row, out_row, grad_head, x_head, out_head, inside, w1, w2, w3,
    cos1, cos2, across1, across2, sum1, sum2, sum3, eps, HEADS: tl.constexpr, D: tl.constexpr,
    P: tl.constexpr, PAIRS: tl.constexpr, BD: tl.constexpr, TAIL: tl.constexpr,
    INTERLEAVED: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Write the gradients of every head of a tile of tokens, and add to the weight's sums.

    The sums are [BT, BH, P] twice and [BT, BH, BD]. `_store_sums` adds up their heads at the end.
    """
    for first_head in range(0, HEADS, BH):
        head = first_head + tl.arange(0, BH)[None, :, None]
        exists = inside & (head < HEADS)
        at = head.to(tl.int64)
        g1, g2, g3 = _load_head(
            grad + grad_row + at * grad_head, exists, P, PAIRS, BD, TAIL, INTERLEAVED, BT, BH
        )
        x1, x2, x3 = _load_head(
            x + x_row + at * x_head, exists, P, PAIRS, BD, TAIL, INTERLEAVED, BT, BH
        )
        y1 = g1 * cos1 + g2 * across1
        y2 = g2 * cos2 + g1 * across2
        r = _reciprocal_rms(x1, x2, x3, eps, D, BD, TAIL)
        r = tl.where(exists, r, 0.0)  # where there is no head, r is infinite if eps is 0
        n1, n2 = x1 * r, x2 * r
        dot = tl.sum(y1 * w1 * n1 + y2 * w2 * n2, axis=2)
        n3, d3 = x3, x3
        if TAIL > 0:
            n3 = x3 * r
            dot += tl.sum(g3 * w3 * n3, axis=2)
        along = (dot / D)[:, :, None]
        d1 = r * (y1 * w1 - n1 * along)
        d2 = r * (y2 * w2 - n2 * along)
        sum1 += y1 * n1
        sum2 += y2 * n2
        if TAIL > 0:
            d3 = r * (g3 * w3 - n3 * along)
            sum3 += g3 * n3
        _store_head(out + out_row + at * out_head, d1, d2, d3, exists, P, PAIRS, BD, TAIL,
                    INTERLEAVED, BT, BH)  # fmt: skip
    return sum1, sum2, sum3


@triton.jit(do_not_specialize=["batch", "length", "rows"])
def _qk_norm_rope_kernel(
    qkv, q_weight, k_weight, cos, sin, positions, q, k, v, gate, batch, length, rows, eps,
    x_b, x_s, q_b, q_s, q_n, k_b, k_s, k_n, v_b, v_s, v_n, gate_b, gate_s, gate_n,
    cos_a, cos_b, cos_s, sin_a, sin_b, sin_s, pos_a, pos_b, pos_s,
    D: tl.constexpr, P: tl.constexpr, PAIRS: tl.constexpr, BD: tl.constexpr, TAIL: tl.constexpr,
    BC: tl.constexpr, INTERLEAVED: tl.constexpr, FULL: tl.constexpr, INDEXED: tl.constexpr,
    SECTIONS: tl.constexpr, T_PAIRS: tl.constexpr, H_PAIRS: tl.constexpr, W_PAIRS: tl.constexpr,
    SECTIONS_INTERLEAVED: tl.constexpr, ZERO_CENTERED: tl.constexpr, GATED: tl.constexpr,
    COPY: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, BT: tl.constexpr,
    BHQ: tl.constexpr, BHK: tl.constexpr,
):  # fmt: skip
    STEP: tl.constexpr = 2 * D if GATED else D  # from one query to the next
    qw1, qw2, qw3 = _multipliers(q_weight, P, PAIRS, BD, TAIL, INTERLEAVED, ZERO_CENTERED)
    kw1, kw2, kw3 = _multipliers(k_weight, P, PAIRS, BD, TAIL, INTERLEAVED, ZERO_CENTERED)
    tiles = tl.cdiv(length, BT)
    for item in range(tl.program_id(0), batch * tiles, tl.num_programs(0)):
        b = (item // tiles).to(tl.int64)
        start = (item % tiles) * BT
        cos1, cos2, across1, across2 = _coefficients(
            cos, sin, positions, start, b, rows, length, cos_a, cos_b, cos_s, sin_a, sin_b, sin_s,
            pos_a, pos_b, pos_s, P, PAIRS, INTERLEAVED, FULL, INDEXED, False, BT, SECTIONS, T_PAIRS,
            H_PAIRS, W_PAIRS, SECTIONS_INTERLEAVED,
        )  # fmt: skip
        token = start + tl.arange(0, BT)[:, None, None]
        at, inside = token.to(tl.int64), token < length
        x_row = b * x_b + at * x_s
        _heads_forward(
            qkv, q, x_row, b * q_b + at * q_s, STEP, q_n, inside, cos1 * qw1, cos2 * qw2,
            across1 * qw2, across2 * qw1, qw3, eps, HEADS, D, P, PAIRS, BD, TAIL, INTERLEAVED, BT,
            BHQ,
        )  # fmt: skip
        keys = qkv + HEADS * STEP
        _heads_forward(
            keys, k, x_row, b * k_b + at * k_s, D, k_n, inside, cos1 * kw1, cos2 * kw2,
            across1 * kw2, across2 * kw1, kw3, eps, KV_HEADS, D, P, PAIRS, BD, TAIL, INTERLEAVED,
            BT, BHK,
        )  # fmt: skip
        if COPY:
            _copy_heads(keys + KV_HEADS * D, v, x_row, b * v_b + at * v_s, D, v_n, inside, KV_HEADS,
                        D, BHK, BC)  # fmt: skip
            if GATED:
                _copy_heads(qkv + D, gate, x_row, b * gate_b + at * gate_s, STEP, gate_n, inside,
                            HEADS, D, BHQ, BC)  # fmt: skip


@triton.jit
def _store_sums(sums, first, second, tail, P: tl.constexpr, PAIRS: tl.constexpr, BD: tl.constexpr,
                TAIL: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Add up the sums of `ROWS` heads, and write one row in the order of a head's elements."""
    first = tl.sum(tl.reshape(first, (ROWS, P)), axis=0)[None, None, :]
    second = tl.sum(tl.reshape(second, (ROWS, P)), axis=0)[None, None, :]
    tail = tl.sum(tl.reshape(tail, (ROWS, BD)), axis=0)[None, None, :]
    _store_head(sums, first, second, tail, tl.full((1, 1, 1), True, tl.int1), P, PAIRS, BD, TAIL,
                INTERLEAVED, 1, 1)  # fmt: skip


@triton.jit(do_not_specialize=["batch", "length", "rows", "piece_tiles"])
def _qk_norm_rope_backward_kernel(
    grad_q, grad_k, grad_v, grad_gate, qkv, q_weight, k_weight, cos, sin, positions, grad_qkv, sums,
    batch, length, rows, piece_tiles, eps, q_b, q_s, q_n, k_b, k_s, k_n,
    v_b, v_s, v_n, gate_b, gate_s, gate_n, x_b, x_s, gx_b, gx_s,
    cos_a, cos_b, cos_s, sin_a, sin_b, sin_s, pos_a, pos_b, pos_s,
    D: tl.constexpr, P: tl.constexpr, PAIRS: tl.constexpr, BD: tl.constexpr, TAIL: tl.constexpr,
    BC: tl.constexpr, INTERLEAVED: tl.constexpr, FULL: tl.constexpr, INDEXED: tl.constexpr,
    SECTIONS: tl.constexpr, T_PAIRS: tl.constexpr, H_PAIRS: tl.constexpr, W_PAIRS: tl.constexpr,
    SECTIONS_INTERLEAVED: tl.constexpr, ZERO_CENTERED: tl.constexpr, GATED: tl.constexpr,
    HAS_V: tl.constexpr, HAS_GATE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    BT: tl.constexpr, BHQ: tl.constexpr, BHK: tl.constexpr,
):  # fmt: skip
    """Write the gradients. A piece of work is `piece_tiles` tiles.

    Each piece writes one row of sums, first of q's weight, then of k's weight.
    """
    STEP: tl.constexpr = 2 * D if GATED else D
    qw1, qw2, qw3 = _multipliers(q_weight, P, PAIRS, BD, TAIL, INTERLEAVED, ZERO_CENTERED)
    kw1, kw2, kw3 = _multipliers(k_weight, P, PAIRS, BD, TAIL, INTERLEAVED, ZERO_CENTERED)
    tiles = tl.cdiv(length, BT)
    pieces = tl.cdiv(batch * tiles, piece_tiles)
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        q1, q2 = tl.zeros((BT, BHQ, P), tl.float32), tl.zeros((BT, BHQ, P), tl.float32)
        k1, k2 = tl.zeros((BT, BHK, P), tl.float32), tl.zeros((BT, BHK, P), tl.float32)
        q3, k3 = tl.zeros((BT, BHQ, BD), tl.float32), tl.zeros((BT, BHK, BD), tl.float32)
        last = tl.minimum((piece + 1) * piece_tiles, batch * tiles)
        for item in range(piece * piece_tiles, last):
            b = (item // tiles).to(tl.int64)
            start = (item % tiles) * BT
            cos1, cos2, across1, across2 = _coefficients(
                cos, sin, positions, start, b, rows, length, cos_a, cos_b, cos_s, sin_a, sin_b,
                sin_s, pos_a, pos_b, pos_s, P, PAIRS, INTERLEAVED, FULL, INDEXED, True, BT,
                SECTIONS, T_PAIRS, H_PAIRS, W_PAIRS, SECTIONS_INTERLEAVED,
            )  # fmt: skip
            token = start + tl.arange(0, BT)[:, None, None]
            at, inside = token.to(tl.int64), token < length
            # Coefficients are NaN beyond the last token and pair. Keep them out of the sums.
            if not INDEXED or P > PAIRS:
                j = tl.arange(0, P)[None, None, :]
                there = inside & (j < PAIRS)
                cos1, cos2 = tl.where(there, cos1, 0.0), tl.where(there, cos2, 0.0)
                across1, across2 = tl.where(there, across1, 0.0), tl.where(there, across2, 0.0)
            x_row, out_row = b * x_b + at * x_s, b * gx_b + at * gx_s
            q1, q2, q3 = _heads_backward(
                grad_q, qkv, grad_qkv, b * q_b + at * q_s, x_row, out_row, q_n, STEP, STEP, inside,
                qw1, qw2, qw3, cos1, cos2, across1, across2, q1, q2, q3, eps, HEADS, D, P, PAIRS,
                BD, TAIL, INTERLEAVED, BT, BHQ,
            )  # fmt: skip
            keys, to_keys = qkv + HEADS * STEP, grad_qkv + HEADS * STEP
            k1, k2, k3 = _heads_backward(
                grad_k, keys, to_keys, b * k_b + at * k_s, x_row, out_row, k_n, D, D, inside,
                kw1, kw2, kw3, cos1, cos2, across1, across2, k1, k2, k3, eps, KV_HEADS, D, P, PAIRS,
                BD, TAIL, INTERLEAVED, BT, BHK,
            )  # fmt: skip
            to_values = to_keys + KV_HEADS * D
            if HAS_V:
                _copy_heads(grad_v, to_values, b * v_b + at * v_s, out_row, v_n, D, inside,
                            KV_HEADS, D, BHK, BC)  # fmt: skip
            else:
                _clear_heads(to_values, out_row, D, inside, KV_HEADS, D, BT, BHK, BC)
            if HAS_GATE:
                _copy_heads(grad_gate, grad_qkv + D, b * gate_b + at * gate_s, out_row, gate_n,
                            STEP, inside, HEADS, D, BHQ, BC)  # fmt: skip
            elif GATED:
                _clear_heads(grad_qkv + D, out_row, STEP, inside, HEADS, D, BT, BHQ, BC)
        of_q = sums + piece * 2 * D
        _store_sums(of_q, q1, q2, q3, P, PAIRS, BD, TAIL, INTERLEAVED, BT * BHQ)
        _store_sums(of_q + D, k1, k2, k3, P, PAIRS, BD, TAIL, INTERLEAVED, BT * BHK)


def qk_norm_rope(
    qkv, q_weight, k_weight, cos, sin, positions, num_heads, num_kv_heads, eps, zero_centered,
    gated, mrope_section, section_layout, pair_layout, rotary_dim, q, k, v, gate,
):  # fmt: skip
    """Write q, k, v and the gate. Arguments as in the operator."""
    batch, length, _ = qkv.shape
    angles, strides = _angles(
        cos, sin, positions, mrope_section, section_layout, pair_layout, rotary_dim
    )
    sizes = _tiles(
        q_weight.shape[0], rotary_dim, num_heads, num_kv_heads, angles, TOKENS, qkv.device
    )
    items = batch * cdiv(length, sizes["BT"])
    _qk_norm_rope_kernel[vector_grid(items, qkv.device)](
        qkv, q_weight, k_weight, cos, sin, positions, q, k, v, gate, batch, length, cos.shape[2],
        eps, *qkv.stride()[:2], *_strides(q), *_strides(k), *_strides(v), *_strides(gate),
        *strides, ZERO_CENTERED=zero_centered, GATED=gated, COPY=v is not None,
        HEADS=num_heads, KV_HEADS=num_kv_heads, **angles, **sizes,
    )  # fmt: skip


def qk_norm_rope_backward(
    grad_q, grad_k, grad_v, grad_gate, qkv, q_weight, k_weight, cos, sin, positions, num_heads,
    num_kv_heads, eps, zero_centered, gated, mrope_section, section_layout, pair_layout, rotary_dim,
    grad_qkv, grad_q_weight, grad_k_weight,
):  # fmt: skip
    """Write the gradients.

    Each piece writes its sums over tokens to a row of its own. So no atomics are needed, and the
    result is the same each time.
    """
    batch, length, _ = qkv.shape
    dim = q_weight.shape[0]
    angles, strides = _angles(
        cos, sin, positions, mrope_section, section_layout, pair_layout, rotary_dim
    )
    sizes = _tiles(dim, rotary_dim, num_heads, num_kv_heads, angles, BACKWARD_TOKENS, qkv.device)
    items = batch * cdiv(length, sizes["BT"])
    piece_tiles = cdiv(items, PIECES)
    pieces = cdiv(items, piece_tiles)
    sums = qkv.new_empty((pieces, 2, dim), dtype=torch.float32)
    _qk_norm_rope_backward_kernel[vector_grid(pieces, qkv.device)](
        grad_q, grad_k, grad_v, grad_gate, qkv, q_weight, k_weight, cos, sin, positions, grad_qkv,
        sums, batch, length, cos.shape[2], piece_tiles, eps,
        *_strides(grad_q), *_strides(grad_k), *_strides(grad_v), *_strides(grad_gate),
        *qkv.stride()[:2], *grad_qkv.stride()[:2], *strides, ZERO_CENTERED=zero_centered,
        GATED=gated, HAS_V=grad_v is not None, HAS_GATE=grad_gate is not None, HEADS=num_heads,
        KV_HEADS=num_kv_heads, **angles, **sizes,
    )  # fmt: skip
    grad_q_weight.copy_(sums[:, 0].sum(0))
    grad_k_weight.copy_(sums[:, 1].sum(0))


def _strides(x) -> tuple[int, int, int]:
    """Return the strides of batch, token and head."""
    return (0, 0, 0) if x is None else x.stride()[:3]


def _angles(cos, sin, positions, mrope_section, section_layout, pair_layout, rotary_dim):
    """Return the constants of the rotation, and the strides of the tables and positions.

    The stride of an axis or a batch of size 1, which is shared, is 0.
    """
    t, h, w = mrope_section or (0, 0, 0)
    strides = []
    for x in (cos, sin, positions):
        each = (0, 0, 0) if x is None else x.stride()[:3]
        shared = (False,) * 3 if x is None else [n == 1 for n in x.shape[:2]] + [False]
        strides += [0 if one else stride for one, stride in zip(shared, each, strict=True)]
    constants = {
        "PAIRS": rotary_dim // 2,
        "INTERLEAVED": pair_layout == "interleaved",
        "FULL": cos.shape[-1] == rotary_dim,
        "INDEXED": positions is not None,
        "SECTIONS": bool(mrope_section),
        "T_PAIRS": t,
        "H_PAIRS": h,
        "W_PAIRS": w,
        "SECTIONS_INTERLEAVED": section_layout == "interleaved",
    }
    return constants, strides


def _tiles(
    dim: int, rotary_dim: int, heads: int, kv_heads: int, angles: dict, most_tokens: int,
    device: torch.device,
) -> dict:  # fmt: skip
    """Return the shape of a tile that fits on chip. It depends on the model, never on lengths."""
    pairs, tail = max(NARROWEST, next_power_of_2(rotary_dim // 2)), dim - rotary_dim
    if angles["INTERLEAVED"] and pairs == 32 and socs.is_ascend950(hardware.soc(device)):
        pairs = 64  # with 32 pairs in a row, that compiler stops at an assertion of its own
    padded_tail = max(NARROWEST, next_power_of_2(tail))
    width = 2 * pairs + (padded_tail if tail else 0)
    if most_tokens > 1:  # the forward kernel has room for a tail's padding
        width = min(width, next_power_of_2(dim))
    fits = max(1, TILE[angles["INTERLEAVED"]] // width)  # heads of tokens in a tile
    fits = next_power_of_2(fits + 1) // 2
    q_heads = min(fits, next_power_of_2(heads))
    tokens = 1 if angles["INDEXED"] else min(most_tokens, fits // q_heads)
    if angles["INTERLEAVED"] and angles["FULL"]:
        tokens = max(1, min(tokens, TABLE_PAIRS // pairs))
    return {
        "D": dim,
        "P": pairs,
        "BD": padded_tail,
        "TAIL": tail,
        "BC": max(NARROWEST, next_power_of_2(dim)),
        "BT": tokens,
        "BHQ": q_heads,
        "BHK": min(fits // tokens, next_power_of_2(kv_heads)),
    }
