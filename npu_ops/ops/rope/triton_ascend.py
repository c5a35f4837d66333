"""Shared by rope, mrope and qk_norm_rope: rope in Triton, for Ascend and NVIDIA.

Reference: reference.py

A program loops over tiles of tokens. It loads a tile's coefficients once and rotates all heads of q
and of k with them. Tiles are [BT tokens, BH heads, P pairs]; P is a power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from npu_ops.core import hardware, socs
from npu_ops.core.grid import cdiv, next_power_of_2, tile_elements, vector_grid
from npu_ops.ops.rope.packing import NOBODY

# Whether pairs are interleaved -> pairs in a tile. Argument: on-chip bytes that the vendor's
# compiler reserves per pair (fp32, with a tail to copy). Splitting interleaved pairs takes twice
# the memory.
TILE = {False: tile_elements(96), True: tile_elements(192)}
# Maximum number of pairs of a full-width interleaved table in a tile. On chip each pair takes 32
# bytes in each of four tables, double-buffered.
TABLE_PAIRS = 128
# Minimum of P. Narrower rows would waste most of a vector instruction; the compiler rejects some.
NARROWEST = 16


@triton.jit
def load_row(row, exists, P: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
             FULL: tl.constexpr, BT: tl.constexpr):  # fmt: skip
    """Load the table entries of the first and second element of each pair, fp32 [BT, P] each.

    row: pointers [BT, 1], or one pointer. exists: whether the row may be read, of the same shape;
    entries of other rows are NaN.
    """
    j = tl.arange(0, P)[None, :]
    mask = exists & (j < PAIRS)
    if not FULL:
        first = tl.load(row + j, mask=mask, other=float("nan")).to(tl.float32)
        second = first
    elif INTERLEAVED:
        e = tl.arange(0, 2 * P)[None, :]
        mask = exists & (e < 2 * PAIRS)
        both = tl.load(row + e, mask=mask, other=float("nan")).to(tl.float32)
        first, second = tl.split(tl.reshape(both, (BT, P, 2)))
    else:
        first = tl.load(row + j, mask=mask, other=float("nan")).to(tl.float32)
        second = tl.load(row + j + PAIRS, mask=mask, other=float("nan")).to(tl.float32)
    return first, second


@triton.jit
def with_direction(cos1, cos2, sin1, sin2, INVERSE: tl.constexpr):
    """Return cos1, cos2, across1 and across2, [BT, 1, P] each.

    out1 is x1 cos1 + x2 across1, and out2 is x2 cos2 + x1 across2.
    """
    if INVERSE:
        across1, across2 = sin2, 0.0 - sin1
    else:
        across1, across2 = 0.0 - sin1, sin2
    return cos1[:, None, :], cos2[:, None, :], across1[:, None, :], across2[:, None, :]


@triton.jit
def _owned(mask, owned):
    """Restrict `mask` to tokens that belong to a sequence."""
    if owned is None:
        return mask
    else:
        return mask & owned


@triton.jit
def rotate_heads(x, out, x_row, out_row, x_head, out_head, inside, HEADS: tl.constexpr, cos1,
                 cos2, across1, across2, P: tl.constexpr, PAIRS: tl.constexpr, TAIL: tl.constexpr,
                 INTERLEAVED: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
                 owned=None):  # fmt: skip
    """Rotate every head of a tile of tokens, and copy the elements after the rotated part.

    x_row, out_row: int64 [BT, 1, 1], offset of each token in elements.
    inside: mask of the tokens that exist.
    owned: mask of the tokens that belong to a sequence; None: all. Other tokens are read as 0.
    """
    for first_head in range(0, HEADS, BH):
        head = first_head + tl.arange(0, BH)[None, :, None]
        exists = inside & (head < HEADS)
        x_at = x + x_row + head.to(tl.int64) * x_head
        out_at = out + out_row + head.to(tl.int64) * out_head
        # Load contiguously and split on chip: a strided load would move single elements.
        if INTERLEAVED:
            e = tl.arange(0, 2 * P)[None, None, :]
            mask = exists & (e < 2 * PAIRS)
            both = tl.load(x_at + e, mask=_owned(mask, owned), other=0.0).to(tl.float32)
            x1, x2 = tl.split(tl.reshape(both, (BT, BH, P, 2)))
            out1 = x1 * cos1 + x2 * across1
            out2 = x2 * cos2 + x1 * across2
            both = tl.reshape(tl.join(out1, out2), (BT, BH, 2 * P))
            tl.store(out_at + e, both.to(out.dtype.element_ty), mask=mask)
        else:
            j = tl.arange(0, P)[None, None, :]
            mask = exists & (j < PAIRS)
            x1 = tl.load(x_at + j, mask=_owned(mask, owned), other=0.0).to(tl.float32)
            x2 = tl.load(x_at + j + PAIRS, mask=_owned(mask, owned), other=0.0).to(tl.float32)
            out1 = x1 * cos1 + x2 * across1
            out2 = x2 * cos2 + x1 * across2
            tl.store(out_at + j, out1.to(out.dtype.element_ty), mask=mask)
            tl.store(out_at + j + PAIRS, out2.to(out.dtype.element_ty), mask=mask)
        for start in tl.static_range(0, TAIL, 2 * P):
            e = start + tl.arange(0, 2 * P)[None, None, :]
            mask = exists & (e < TAIL)
            tail = tl.load(x_at + 2 * PAIRS + e, mask=_owned(mask, owned), other=0.0)
            tl.store(out_at + 2 * PAIRS + e, tail, mask=mask)


@triton.jit(do_not_specialize=["batch", "length", "rows"])
def _rope_kernel(
    q, k, cos, sin, positions, q_out, k_out, batch, length, rows,
    q_b, q_s, q_n, k_b, k_s, k_n, qo_b, qo_s, qo_n, ko_b, ko_s, ko_n,
    cos_b, cos_s, sin_b, sin_s, pos_b, pos_s,
    P: tl.constexpr, PAIRS: tl.constexpr, TAIL: tl.constexpr, INTERLEAVED: tl.constexpr,
    FULL: tl.constexpr, INVERSE: tl.constexpr, INDEXED: tl.constexpr,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, BT: tl.constexpr, BHQ: tl.constexpr,
    BHK: tl.constexpr, NOBODY: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(length, BT)
    for item in range(tl.program_id(0), batch * tiles, tl.num_programs(0)):
        b = (item // tiles).to(tl.int64)
        start = (item % tiles) * BT
        if INDEXED:  # BT is 1
            row = tl.load(positions + b * pos_b + start.to(tl.int64) * pos_s).to(tl.int64)
            owned = row != NOBODY
            exists = (row >= 0) & (row < rows)
            row = tl.where(exists, row, 0)
        else:
            s = start + tl.arange(0, BT)[:, None]
            row = s.to(tl.int64)
            exists = s < length
        cos1, cos2 = load_row(
            cos + b * cos_b + row * cos_s, exists, P, PAIRS, INTERLEAVED, FULL, BT
        )
        sin1, sin2 = load_row(
            sin + b * sin_b + row * sin_s, exists, P, PAIRS, INTERLEAVED, FULL, BT
        )
        if INDEXED:
            cos1, cos2 = tl.where(owned, cos1, 0.0), tl.where(owned, cos2, 0.0)
            sin1, sin2 = tl.where(owned, sin1, 0.0), tl.where(owned, sin2, 0.0)
        cos1, cos2, across1, across2 = with_direction(cos1, cos2, sin1, sin2, INVERSE)
        token = start + tl.arange(0, BT)[:, None, None]
        at, inside = token.to(tl.int64), token < length
        rotate_heads(q, q_out, b * q_b + at * q_s, b * qo_b + at * qo_s, q_n, qo_n, inside, Q_HEADS,
                     cos1, cos2, across1, across2, P, PAIRS, TAIL, INTERLEAVED, BT, BHQ,
                     owned if INDEXED else None)  # fmt: skip
        rotate_heads(k, k_out, b * k_b + at * k_s, b * ko_b + at * ko_s, k_n, ko_n, inside, K_HEADS,
                     cos1, cos2, across1, across2, P, PAIRS, TAIL, INTERLEAVED, BT, BHK,
                     owned if INDEXED else None)  # fmt: skip


def rope(q, k, cos, sin, positions, layout, pair_layout, inverse, rotary_dim, q_out, k_out):
    """Rotate q into q_out and k into k_out. Arguments as in the operator."""
    batch, length = sizes(q, layout)
    strides = [token_strides(x, layout) for x in (q, k, q_out, k_out)]
    tables = [(0 if t.shape[0] == 1 else t.stride(0), t.stride(1)) for t in (cos, sin)]
    places = (0, 0)
    if positions is not None:
        places = (0 if positions.shape[0] == 1 else positions.stride(0), positions.stride(1))
    elif length == 1:  # decode: one token per sequence, so make tiles of the batch
        batch, length = 1, batch
        strides = [(0, b, n) for b, _, n in strides]
        tables = [(0, b) for b, _ in tables]
    full = cos.shape[-1] == rotary_dim
    constants = tile_constants(
        q, k, layout, pair_layout, rotary_dim, q_out, full, positions is not None
    )
    # Even in place, write the elements after the rotated part: for tokens after the last sequence
    # they become 0.
    if positions is not None and layout == "TND":
        constants["TAIL"] = q.shape[-1] - rotary_dim
    items = batch * cdiv(length, constants["BT"])
    _rope_kernel[vector_grid(items, q.device)](
        q, k, cos, sin, positions, q_out, k_out, batch, length, cos.shape[1],
        *(stride for three in strides for stride in three),
        *tables[0], *tables[1], *places, FULL=full, INVERSE=inverse,
        INDEXED=positions is not None, NOBODY=NOBODY, **constants,
    )  # fmt: skip


def sizes(x: torch.Tensor, layout: str) -> tuple[int, int]:
    """Return batch and length; TND has a batch of one."""
    if layout == "TND":
        return 1, x.shape[0]
    return x.shape[layout.index("B")], x.shape[layout.index("S")]


def token_strides(x: torch.Tensor, layout: str) -> tuple[int, int, int]:
    """Return the strides of batch, token and head."""
    if layout == "TND":
        return 0, x.stride(0), x.stride(1)
    return tuple(x.stride(layout.index(axis)) for axis in "BSN")


def heads(x: torch.Tensor, layout: str) -> int:
    """Return the number of heads."""
    return x.shape[layout.index("N")]


def tile_constants(
    q, k, layout, pair_layout, rotary_dim, q_out, full: bool, one_token: bool
) -> dict:
    """Return the compile-time constants of a launch. They depend on the model, never on lengths."""
    pairs = rotary_dim // 2
    interleaved = pair_layout == "interleaved"
    padded = max(NARROWEST, next_power_of_2(pairs))
    if interleaved and padded == 32 and socs.is_ascend950(hardware.soc(q.device)):
        padded = 64  # with 32 pairs in a row, an assertion in that compiler fails
    fits = max(1, TILE[interleaved] // padded)  # rows in a tile: tokens times heads
    q_heads = min(fits, next_power_of_2(heads(q, layout)))
    tokens = 1 if one_token else fits // q_heads
    if interleaved and full:
        tokens = max(1, min(tokens, TABLE_PAIRS // padded))
    return {
        "P": padded,
        "PAIRS": pairs,
        "TAIL": 0 if q_out is q else q.shape[-1] - rotary_dim,
        "INTERLEAVED": interleaved,
        "Q_HEADS": heads(q, layout),
        "K_HEADS": heads(k, layout),
        "BT": tokens,
        "BHQ": q_heads,
        "BHK": min(fits // tokens, next_power_of_2(heads(k, layout))),
    }
