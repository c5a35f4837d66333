"""Find the table rows of packed tokens in one launch, in Triton. Reference: packing.py"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from npu_ops.core.grid import cdiv, vector_grid
from npu_ops.core.lengths_triton_ascend import STARTS, int32_starts, looked_at

TOKENS = 64  # tokens per tile
BLOCK = 128  # starts that a tile's tokens are compared with at a time


@triton.jit(do_not_specialize=["sequences", "tokens"])
def _rows_kernel(
    starts, rows, sequences, tokens, NOBODY: tl.constexpr, NO_ROW: tl.constexpr,
    PER_TOKEN: tl.constexpr, BT: tl.constexpr, BLOCK: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    """Write each token's row: its position in its sequence, or with PER_TOKEN its own index.

    A token's sequence begins at the last start that is at or before the token.
    """
    right, last = looked_at(starts, sequences, tokens, STARTS)
    for tile in range(tl.program_id(0), tl.cdiv(tokens, BT), tl.num_programs(0)):
        token = tile * BT + tl.arange(0, BT)
        row = token
        if not PER_TOKEN:
            own = tl.zeros((BT,), tl.int32)
            for begin in range(0, sequences, BLOCK):
                n = begin + tl.arange(0, BLOCK)
                start = tl.load(starts + n, mask=n < sequences, other=0)
                started = tl.where(start[None, :] <= token[:, None], start[None, :], 0)
                own = tl.maximum(own, tl.max(started, axis=1))
            row = token - own
        row = tl.where(token < last, row, NOBODY)
        row = tl.where(right, row, NO_ROW)
        tl.store(rows + token, row.to(rows.dtype.element_ty), mask=token < tokens)


def packed_rows(cu_seqlens, rows: torch.Tensor, nobody: int, no_row: int, per_token: bool) -> None:
    """Write the row of each token to `rows`, `[1, tokens]`.

    per_token: the row is the token's index, not its position in its sequence.
    """
    tokens = rows.shape[1]
    _rows_kernel[vector_grid(cdiv(tokens, TOKENS), rows.device)](
        int32_starts(cu_seqlens), rows, cu_seqlens.shape[0] - 1, tokens, NOBODY=nobody,
        NO_ROW=no_row, PER_TOKEN=per_token, BT=TOKENS, BLOCK=BLOCK, STARTS=STARTS,
    )  # fmt: skip
