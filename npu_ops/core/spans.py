"""Packed sequences over the ranks of a group: which tokens each rank has, of which sequences.

Every rank is told where the whole sequences start. Nothing here waits for a device, so wrong
lengths on one make this rank's lengths wrong too, and what computes with them gives NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import distributed

from npu_ops.core import check as arguments
from npu_ops.core import indices, lengths, library, make
from npu_ops.core.collective import all_gather

LAYOUTS = ("contiguous", "zigzag")
_WRONG = -1  # as the first start


class Span(NamedTuple):
    """A rank's part of all tokens, in the order of ranks. Positions are those of all tokens."""

    starts: torch.Tensor  # [N + 1]: the part of each sequence that is here, often empty
    before: torch.Tensor  # [1]: how many tokens of the first one here other ranks have; may be 0
    entering: torch.Tensor  # [1]: which sequence that is
    leaving: torch.Tensor  # bool [T]: the tokens of the sequence that the span ends in
    passes: torch.Tensor  # bool [ranks]: whether a rank ends in a sequence that began before it


def check(group, layout: str, initial_state, cu_seqlens) -> None:
    """Raise ValueError for arguments that do not go together; lengths are looked at later."""
    arguments.one_of("cp_layout", layout, LAYOUTS)
    if group is not None:
        arguments.alone("cp_group", initial_state=initial_state)
    if layout == "zigzag" and (group is None or cu_seqlens is None):
        missing = "cp_group" if group is None else "cu_seqlens"
        raise ValueError(f"{missing}: got None with cp_layout='zigzag', needs one")


def contiguous(cu_seqlens: torch.Tensor, tokens: int, group) -> Span:
    """This rank's span of `tokens` tokens; ranks may have different numbers, also none."""
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
    inside = entering < starts.shape[0] - 1  # tokens behind the last sequence belong to nobody
    positions = begin + make.counted(tokens, device=starts.device)
    return Span(
        starts=torch.where(right, (starts - begin).clamp(0, tokens), _WRONG).to(cu_seqlens.dtype),
        before=torch.where(inside, begin - starts[entering], 0),
        entering=entering.clamp(max=starts.shape[0] - 2),
        leaving=positions >= starts[last[rank]],
        passes=starts[last] < begins,
    )


def _sequence_at(starts, positions):
    """The number of the sequence that has each position: the last one that starts there or before;
    N behind all of them."""
    return ((starts <= positions[:, None]).sum(1) - 1).clamp(min=0)


def zigzag(cu_seqlens: torch.Tensor, tokens: int, group) -> torch.Tensor:
    """`[2 N + 1]`: the starts of this rank's two chunks of each sequence, one after the other.

    A sequence is 2 n equal chunks for n ranks; rank r has chunks r and 2 n - 1 - r.
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
    """`[2 n, N, ...]`, chunk by chunk, of all ranks' `[2 N, ...]`."""
    gathered = all_gather(chunks, group).unflatten(1, (-1, 2))
    return torch.cat([gathered[:, :, 0], gathered[:, :, 1].flip(0)])


def of_rank(chunks: torch.Tensor, group) -> torch.Tensor:
    """`[2 N, ...]`, what this rank has of `[2 n, N, ...]`."""
    rank = distributed.get_rank(group)
    return torch.stack([chunks[rank], chunks[chunks.shape[0] - 1 - rank]], 1).flatten(0, 1)
