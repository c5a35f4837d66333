"""The table rows of packed tokens, as torch operators: compiled callers' lengths are checked too.

On the CPU, that is; on a device it would wait for it, and a row outside the table gives NaN.
"""

from __future__ import annotations

import itertools

import torch

from npu_ops.core import indices, library, make


def packed_positions(cu_seqlens, tokens: int, rows: int) -> torch.Tensor:
    """The position of each packed token within its sequence, `[1, tokens]`, made on the device.

    cu_seqlens: `[n + 1]`, the sequences' starts and their end: 0 first, `tokens` last. No sequence
    is longer than a table of `rows`.
    """
    return _positions_of(cu_seqlens, tokens, rows)


def packed_rows(cu_seqlens, tokens, rows, max_seqlen, cp_size, cp_rank) -> torch.Tensor:
    """The row of Megatron's freqs of each token of this rank, `[1, tokens]`, made on the device.

    cu_seqlens: of the whole sequences; tokens after the last one are padding. rows: of freqs, which
    are for each position, or for each token if there are more than max_seqlen.
    """
    return _rows_of(cu_seqlens, tokens, rows, max_seqlen, cp_size, cp_rank)


def _positions(cu_seqlens, tokens, rows):
    if cu_seqlens.device.type == "cpu":
        starts = indices.starts_of("cu_seqlens", cu_seqlens, tokens)
        _check_longest(starts, rows, "cos's")
    token = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence = (torch.searchsorted(cu_seqlens, token, right=True) - 1).clamp_min(0)
    return (token - cu_seqlens[sequence])[None]


def _rows(cu_seqlens, tokens, rows, max_seqlen, cp_size, cp_rank):
    per_token = rows == tokens * cp_size if max_seqlen is None else rows > max_seqlen
    if cu_seqlens.device.type == "cpu":
        starts = indices.starts_of("cu_seqlens", cu_seqlens, tokens * cp_size, padded=True)
        _check_longest([0, starts[-1]] if per_token else starts, rows, "freqs'")
        _check_chunks(starts, 1 if cp_size == 1 else 2 * cp_size)
    starts = cu_seqlens.long()
    if cp_size == 1:
        return _whole_rows(starts[:-1], tokens, rows, per_token)
    lengths = starts.diff() // cp_size
    local_starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    token = make.counted(tokens, device=starts.device)
    sequence = torch.searchsorted(local_starts, token, right=True) - 1
    sequence = sequence.clamp(0, lengths.numel() - 1)
    position = token - local_starts[sequence]
    chunk = lengths[sequence] // 2
    behind = 2 * (cp_size - 1 - cp_rank) * chunk  # from the end of the first chunk to the second
    position = cp_rank * chunk + position + torch.where(position < chunk, 0, behind)
    if per_token:
        position = position + starts[sequence]
    return position.clamp(0, rows - 1)[None]


def _whole_rows(starts, tokens, rows, per_token):
    """`_rows` of a single rank, in few launches: on a device they are made for each call."""
    token = make.counted(tokens, device=starts.device)
    if per_token:
        return token.clamp(max=rows - 1)[None]
    own = starts[torch.searchsorted(starts, token, right=True) - 1]
    return (token - own).clamp(0, rows - 1)[None]


def _check_longest(starts, rows, whose) -> None:
    lengths = (end - start for start, end in itertools.pairwise(starts))
    longest = max(lengths, default=0)
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
