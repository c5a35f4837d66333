"""Draws and loads dropout's keep mask. Reference: reference.keep_mask

A separate kernel draws a bit for each weight. If the attention kernels drew the bits themselves,
the vendor's compiler would run out of on-chip memory, and compiling would take extremely long. A
byte has the bits of eight keys, which are 16 apart.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from npu_ops.core import rng
from npu_ops.core.grid import cdiv, tile_elements, vector_grid
from npu_ops.ops.bias_dropout_add.triton_ascend import draw

# Elements of a tile. The vendor's compiler reserves 96 on-chip bytes per element for four words.
TILE = tile_elements(96)
ACROSS = 16  # bytes of a row per tile


@triton.jit
def _bits(word, threshold, LANE: tl.constexpr):
    """Return the keep bits of the two 16-bit draws in each word: bits LANE and LANE + 1."""
    low = tl.where((word & 0xFFFF).to(tl.int32) >= threshold, 1 << LANE, 0)
    return low | tl.where((word >> 16).to(tl.int32) >= threshold, 2 << LANE, 0)


@triton.jit(do_not_specialize=["rows", "across", "threshold"])
def _keep_kernel(rng_state, keep, rows, across, threshold, BR: tl.constexpr, BJ: tl.constexpr):
    for tile in range(tl.program_id(0), tl.cdiv(rows, BR) * across, tl.num_programs(0)):
        row = tile // across * BR + tl.arange(0, BR)
        column = tile % across * BJ + tl.arange(0, BJ)
        word0, word1, word2, word3 = draw(rng_state, row, column)
        bits = _bits(word0, threshold, 0) | _bits(word1, threshold, 2)
        bits = bits | _bits(word2, threshold, 4) | _bits(word3, threshold, 6)
        at = keep + row.to(tl.int64)[:, None] * (across * BJ) + column[None, :]
        tl.store(at, bits.to(tl.uint8), mask=(row < rows)[:, None])


def keep_bits(rows: int, columns: int, p: float, rng_state: torch.Tensor) -> torch.Tensor:
    """Draw dropout's keep mask, one bit per element: uint8 `[rows, 16 for each 128 columns]`."""
    across = cdiv(columns, 128)
    keep = torch.empty((rows, across * ACROSS), dtype=torch.uint8, device=rng_state.device)
    size = TILE // ACROSS
    _keep_kernel[vector_grid(cdiv(rows, size) * across, rng_state.device)](
        rng_state, keep, rows, across, rng.threshold(p), BR=size, BJ=ACROSS
    )
    return keep


@triton.jit
def load_keep(keep, stride, row0, rows, key0, BQ: tl.constexpr, BK: tl.constexpr):
    """Return 1 for kept weights of rows and keys, else 0; fp32 [BQ, BK].

    key0: position in the sequence, a multiple of BK, which is 16, 32 or 64. rows: number of
    existing rows.
    """
    row, byte = tl.arange(0, BQ), tl.arange(0, 16)
    at = keep + (row0 + row).to(tl.int64)[:, None] * stride + (key0 // 128 * 16 + byte)[None, :]
    bits = tl.load(at, mask=(row < rows)[:, None], other=0).to(tl.int32)
    lane = tl.arange(0, BK // 16)
    first = 1 << (key0 % 128 // 16)
    # Avoid shifting a vector by a vector: the compiler would do that element by element.
    low = tl.where((lane & 1) == 0, first, first * 2)
    bit = tl.where(lane < 2, low, low * 4)
    kept = (bits[:, None, :] & bit[None, :, None]) > 0
    return tl.reshape(tl.where(kept, 1.0, 0.0), (BQ, BK))
