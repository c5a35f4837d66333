"""The table rows of packed tokens, as torch operators, so that compiled callers are checked too.

Lengths are checked on the CPU; on a device the check would wait for it. There a token whose row is
not in the table becomes NaN, and all tokens do if the lengths are invalid (core/lengths.py).
"""

from __future__ import annotations

import importlib
import itertools

import torch

from npu_ops.core import indices, lengths, library, make

# The row of an unowned token, whose result is 0 (csrc/rope/rotate.h).
NOBODY = -(1 << 30)
_NO_ROW = -1


def packed_positions(cu_seqlens, tokens: int, rows: int) -> torch.Tensor:
    """Return the position of each packed token in its sequence, `[1, tokens]`, made on the device.

    cu_seqlens: `[n + 1]`, the sequences' starts and their end. No sequence is longer than a table
    of `rows`. Unowned tokens have NOBODY.
    """
    return _positions_of(cu_seqlens, tokens, rows)


def packed_rows(cu_seqlens, tokens, rows, max_seqlen, cp_size, cp_rank) -> torch.Tensor:
    """Return each token's row of Megatron's freqs on this rank, `[1, tokens]`, made on the device.

    cu_seqlens: of the whole sequences; unowned tokens have NOBODY. rows: the number of rows of
    freqs; one row is for a position, or for a token if there are more than max_seqlen.
    """
    return _rows_of(cu_seqlens, tokens, rows, max_seqlen, cp_size, cp_rank)


def _positions(cu_seqlens, tokens, rows):
    if cu_seqlens.device.type == "cpu":
        starts = indices.starts_of("cu_seqlens", cu_seqlens, tokens)
        _check_longest(starts, rows, "cos's")
    if _by_triton(cu_seqlens, tokens):
        return _found(cu_seqlens, tokens, cu_seqlens.dtype, per_token=False)
    token = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence = (torch.searchsorted(cu_seqlens, token, right=True) - 1).clamp_min(0)
    return _of_somebody(cu_seqlens, tokens, token - cu_seqlens[sequence], token)


def _of_somebody(starts, tokens: int, row, token):
    """Return `row`, `[1, tokens]`, with NOBODY for unowned tokens and no row for invalid starts.

    starts: of the `tokens` that all ranks have. token: this rank's tokens, numbered as if the
    tokens of all ranks followed each other.
    """
    row = torch.where(token < starts[-1], row, NOBODY)
    return torch.where(lengths.are_right(starts, tokens), row, _NO_ROW)[None]


def _rows(cu_seqlens, tokens, rows, max_seqlen, cp_size, cp_rank):
    per_token = rows == tokens * cp_size if max_seqlen is None else rows > max_seqlen
    if cu_seqlens.device.type == "cpu":
        starts = indices.starts_of("cu_seqlens", cu_seqlens, tokens * cp_size)
        _check_longest([0, starts[-1]] if per_token else starts, rows, "freqs'")
        _check_chunks(starts, 1 if cp_size == 1 else 2 * cp_size)
    starts = cu_seqlens.long()
    if cp_size == 1 and _by_triton(cu_seqlens, tokens):
        return _found(cu_seqlens, tokens, torch.int64, per_token)
    if cp_size == 1:
        return _whole_rows(starts, tokens, rows, per_token)
    local = starts.diff() // cp_size
    local_starts = torch.nn.functional.pad(local.cumsum(0), (1, 0))
    token = make.counted(tokens, device=starts.device)
    sequence = torch.searchsorted(local_starts, token, right=True) - 1
    sequence = sequence.clamp(0, local.numel() - 1)
    position = token - local_starts[sequence]
    chunk = local[sequence] // 2
    # The distance from the end of this rank's first chunk to its second.
    behind = 2 * (cp_size - 1 - cp_rank) * chunk
    position = cp_rank * chunk + position + torch.where(position < chunk, 0, behind)
    if per_token:
        position = position + starts[sequence]
    return _of_somebody(starts, tokens * cp_size, position, token * cp_size)


def _by_triton(cu_seqlens, tokens: int) -> bool:
    """Return whether one Triton launch computes the rows; a device computes them for each call."""
    on_device = cu_seqlens.device.type in ("npu", "cuda")
    return on_device and tokens > 0 and library.triton_why_not() is None


def _found(cu_seqlens, tokens: int, dtype: torch.dtype, per_token: bool):
    rows = torch.empty((1, tokens), dtype=dtype, device=cu_seqlens.device)
    kernels = importlib.import_module("npu_ops.ops.rope.packing_triton_ascend")
    kernels.packed_rows(cu_seqlens, rows, NOBODY, _NO_ROW, per_token)
    return rows


def _whole_rows(starts, tokens, rows, per_token):
    """Return `_rows` for a single rank."""
    token = make.counted(tokens, device=starts.device)
    position = token
    if not per_token:
        position = token - starts[(torch.searchsorted(starts, token, right=True) - 1).clamp_min(0)]
    return _of_somebody(starts, tokens, position, token)


def _check_longest(starts, rows, whose) -> None:
    longest = max((end - start for start, end in itertools.pairwise(starts)), default=0)
    if longest > rows:
        raise ValueError(f"cu_seqlens: got length {longest}, needs at most {whose} {rows} rows")


def _check_chunks(starts, chunks: int) -> None:
    for begin, end in itertools.pairwise(starts):
        if (end - begin) % chunks:
            raise ValueError(
                f"cu_seqlens: got length {end - begin}, needs multiples of {chunks}, chunks of "
                "equal lengths for context parallel ranks"
            )


_positions_of = library.operator(
    "rope_packed_positions(Tensor cu_seqlens, SymInt tokens, SymInt rows) -> Tensor",
    _positions,
    lambda cu_seqlens, tokens, rows: cu_seqlens.new_empty((1, tokens)),
)
_rows_of = library.operator(
    "rope_packed_rows(Tensor cu_seqlens, SymInt tokens, SymInt rows, SymInt? max_seqlen, "
    "SymInt cp_size, SymInt cp_rank) -> Tensor",
    _rows,
    lambda cu_seqlens, tokens, *rest: cu_seqlens.new_empty((1, tokens), dtype=torch.int64),
)
