"""Find the table row of each packed token.

These are torch operators, so that the checks also run in compiled calls. Lengths are checked on the
CPU only: on a device the check would wait. There, a token whose row is outside the table becomes
NaN, and all tokens become NaN if the lengths are invalid (core/lengths.py).
"""

from __future__ import annotations

import importlib
import itertools

import torch

from npu_ops.core import indices, lengths, library, make

# The row of a token after the last sequence: its result is 0. Also in csrc/rope/rotary_tiling.h.
NOBODY = -(1 << 30)
_NO_ROW = -1


def packed_positions(cu_seqlens, tokens: int, rows: int) -> torch.Tensor:
    """Return the position of each packed token in its sequence, `[1, tokens]`.

    The result is on the device of cu_seqlens; it is NOBODY for tokens after the last sequence.

    cu_seqlens: `[n + 1]`, the starts of the sequences, then the end of the last. No sequence may be
    longer than the table's `rows`.
    """
    return _positions_of(cu_seqlens, tokens, rows)


def packed_rows(cu_seqlens, tokens, rows, max_seqlen, cp_size, cp_rank) -> torch.Tensor:
    """Return the row of Megatron's freqs for each token of this rank, int64 `[1, tokens]`.

    The result is on the device of cu_seqlens; it is NOBODY for tokens after the last sequence.

    cu_seqlens: `[n + 1]`, of the whole sequences, not of this rank's parts of them.
    rows: number of rows of freqs. Each row belongs to a position or to a packed token:
    `apply_rotary_pos_emb_freqs` explains under max_seqlen which of the two.
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
    """Return `row` as `[1, ...]`; NOBODY after the last sequence, _NO_ROW if starts are invalid.

    starts: of the whole sequences. tokens: the number of tokens on all ranks.
    token: indices of this rank's tokens on the scale of `starts`.
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
    # The number of tokens between this rank's two chunks.
    behind = 2 * (cp_size - 1 - cp_rank) * chunk
    position = cp_rank * chunk + position + torch.where(position < chunk, 0, behind)
    if per_token:
        position = position + starts[sequence]
    return _of_somebody(starts, tokens * cp_size, position, token * cp_size)


def _by_triton(cu_seqlens, tokens: int) -> bool:
    """Return whether to compute the rows in one Triton launch: on an NPU or GPU with Triton."""
    on_device = cu_seqlens.device.type in ("npu", "cuda")
    return on_device and tokens > 0 and library.triton_why_not() is None


def _found(cu_seqlens, tokens: int, dtype: torch.dtype, per_token: bool):
    rows = torch.empty((1, tokens), dtype=dtype, device=cu_seqlens.device)
    kernels = importlib.import_module("npu_ops.ops.rope.packing_triton_ascend")
    kernels.packed_rows(cu_seqlens, rows, NOBODY, _NO_ROW, per_token)
    return rows


def _whole_rows(starts, tokens, rows, per_token):
    """Compute `_rows` for cp_size 1."""
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
