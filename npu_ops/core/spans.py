"""Computes which tokens of which packed sequences a rank holds under context parallelism.

Every rank gets the starts of all sequences. No function here waits for a device. If lengths on a
device are invalid, this rank's lengths become invalid as well, and results become NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import distributed

from npu_ops.core import check as arguments
from npu_ops.core import indices, lengths, library, make
from npu_ops.core.collective import all_gather

LAYOUTS = ("contiguous", "zigzag")
_WRONG = -1  # marks starts as invalid: the first of valid starts is 0


class Span(NamedTuple):
    """One rank's part of all tokens; ranks hold consecutive parts.

    N: number of sequences. T: number of this rank's tokens.
    """

    # [N + 1]: starts of the parts of all sequences that are on this rank; most parts may be empty
    starts: torch.Tensor
    # [1]: number of tokens of this rank's first sequence that are on earlier ranks; may be 0
    before: torch.Tensor
    entering: torch.Tensor  # [1]: index of that first sequence
    leaving: torch.Tensor  # bool [T]: whether a token's sequence has this rank's last token
    # bool [ranks]: whether a rank ends in a sequence that began on an earlier rank
    passes: torch.Tensor


def check(group, layout: str, initial_state, cu_seqlens) -> None:
    """Raise ValueError for arguments that cannot be combined. Does not check the lengths."""
    arguments.one_of("cp_layout", layout, LAYOUTS)
    if group is not None:
        arguments.alone("cp_group", initial_state=initial_state)
    if layout == "zigzag" and (group is None or cu_seqlens is None):
        missing = "cp_group" if group is None else "cu_seqlens"
        raise ValueError(f"{missing}: got None with cp_layout='zigzag', needs a value")


def contiguous(cu_seqlens: torch.Tensor, tokens: int, group) -> Span:
    """Return this rank's span of `tokens` tokens; other ranks may have more, fewer or none."""
    counts = all_gather(torch.tensor([tokens], dtype=torch.int64, device=cu_seqlens.device), group)
    ends = counts[:, 0].cumsum(0)
    begins = ends - counts[:, 0]
    starts = cu_seqlens.to(torch.int64)
    if library.readable(starts):
        indices.check_starts("cu_seqlens", cu_seqlens, int(ends[-1]))
    right = lengths.are_right(starts, ends[-1])
    rank = distributed.get_rank(group)
    begin = begins[rank, None]
    last, entering = _sequence_at(starts, ends - 1), _sequence_at(starts, begin)
    inside = entering < starts.shape[0] - 1  # tokens after the last sequence are in no sequence
    positions = begin + make.counted(tokens, device=starts.device)
    return Span(
        starts=torch.where(right, (starts - begin).clamp(0, tokens), _WRONG).to(cu_seqlens.dtype),
        before=torch.where(inside, begin - starts[entering], 0),
        entering=entering.clamp(max=starts.shape[0] - 2),
        leaving=positions >= starts[last[rank]],
        passes=starts[last] < begins,
    )


def _sequence_at(starts, positions):
    """Return the index of the last sequence that starts at or before each position.

    Positions after the last sequence get N.
    """
    return ((starts <= positions[:, None]).sum(1) - 1).clamp(min=0)


def zigzag(cu_seqlens: torch.Tensor, tokens: int, group) -> torch.Tensor:
    """Return `[2 N + 1]`: the starts of this rank's chunks, two per sequence, and the last end.

    Positions count this rank's own tokens. For n ranks, a sequence is cut into 2 n equal chunks;
    rank r has chunks r and 2 n - 1 - r.
    """
    ranks = distributed.get_world_size(group)
    each = cu_seqlens.diff()
    uneven = each % (2 * ranks) != 0
    if library.readable(cu_seqlens):
        indices.check_starts("cu_seqlens", cu_seqlens, ranks * tokens)
        if uneven.any():
            raise ValueError(
                f"cu_seqlens: got a sequence of {int(each[uneven][0])} tokens, needs a multiple "
                f"of {2 * ranks} for zigzag over {ranks} ranks"
            )
    first = cu_seqlens // ranks
    middle = first[:-1] + each // (2 * ranks)
    starts = torch.cat([torch.stack([first[:-1], middle], 1).flatten(), first[-1:]])
    return torch.where(uneven.any() | (cu_seqlens[0] != 0), _WRONG, starts).to(cu_seqlens.dtype)


def in_order(chunks: torch.Tensor, group) -> torch.Tensor:
    """Gather the chunks `[2 N, ...]` of all ranks, see `zigzag`.

    Return `[2 n, N, ...]` for n ranks and N sequences: chunks in the order of their tokens.
    """
    gathered = all_gather(chunks, group).unflatten(1, (-1, 2))
    return torch.cat([gathered[:, :, 0], gathered[:, :, 1].flip(0)])


def of_rank(chunks: torch.Tensor, group) -> torch.Tensor:
    """Select this rank's `[2 N, ...]` of all chunks `[2 n, N, ...]`; the inverse of `in_order`."""
    rank = distributed.get_rank(group)
    return torch.stack([chunks[rank], chunks[chunks.shape[0] - 1 - rank]], 1).flatten(0, 1)
