"""Splits core attention over context-parallel ranks, which share each sequence in zigzag layout.

For n ranks a sequence has 2 n equal chunks, and rank r has chunks r and 2 n - 1 - r (Megatron's
layout). So with a causal mask all ranks have equal work. Each rank gathers the keys and values of
all ranks. With a causal mask, its two chunks of queries attend to keys up to their own ends.
Gradients are summed over the ranks.
"""

from __future__ import annotations

import functools
import sys
from typing import NamedTuple

import torch

from npu_ops.core.collective import all_gather


def why_not(config) -> str | None:
    """Return None, or why npu-ops does not replace attention for this TransformerConfig."""
    size = getattr(config, "context_parallel_size", 1)
    if size == 1:
        return None
    if getattr(config, "window_size", None) is not None:
        return f"context_parallel_size: got {size} with window_size, needs 1"
    if "mindspeed" in sys.modules:
        return (
            f"context_parallel_size: got {size}, needs 1: MindSpeed redistributes sequences "
            "over ranks"
        )
    return None


def group_of(collection):
    """Return the context-parallel group from a layer's process groups, else Megatron's global one.

    collection: the layer's process groups, or None.
    """
    group = getattr(collection, "cp", None)
    state = sys.modules["megatron.core.parallel_state"]
    return state.get_context_parallel_group() if group is None else group


# Functions for dense tensors [s, b, n, d]


def in_order(x: torch.Tensor, group) -> torch.Tensor:
    """Gather the `[s, ...]` of all ranks and return their tokens in order, `[ranks * s, ...]`."""
    chunks = all_gather(x, group).unflatten(1, (2, -1))
    return torch.cat([chunks[:, 0], chunks[:, 1].flip(0)]).flatten(0, 1)


def is_causal_part(mask: torch.Tensor, group) -> bool:
    """Return whether a mask (True masks a key) is exactly this rank's rows of the causal mask."""
    rows, columns = mask.shape[-2:]
    if mask.numel() != rows * columns:
        return False
    places = torch.arange(columns, device=mask.device, dtype=torch.int64)
    own = torch.cat([places.chunk(2 * group.size())[chunk] for chunk in chunks_of(group)])
    return mask.reshape(rows, columns).equal(places > own[:, None])


def chunks_of(group) -> tuple[int, int]:
    """Return which two chunks of a sequence this rank has."""
    return group.rank(), 2 * group.size() - 1 - group.rank()


# Functions for packed tensors [t, n, d]


class Packed(NamedTuple):
    """This rank's two chunks of N sequences as 2 N packed sequences, with the rows of their keys.

    All tensors are in host memory.
    """

    queries: torch.Tensor  # int32 [2 N + 1]: starts of the chunks, then the end of the last
    keys: torch.Tensor  # int32 [2 N + 1]: the same for the keys of each chunk
    rows: torch.Tensor  # int64: the row of each key among the keys gathered from all ranks

    @property
    def longest(self) -> tuple[int, int]:
        return int(self.queries.diff().max()), int(self.keys.diff().max())


def packed(starts: torch.Tensor, group, causal: bool) -> Packed | None:
    """Describe this rank's chunks of the packed sequences that start at `starts`.

    starts: `[N + 1]`, in host memory. Returns None if a sequence does not divide into 2 equal
    chunks per rank.
    """
    if (starts.diff() % (2 * group.size())).any():
        return None
    return _packed(tuple(starts.tolist()), group.size(), group.rank(), causal)


@functools.lru_cache(maxsize=8)  # all layers of a step have the same starts
def _packed(starts: tuple[int, ...], ranks: int, rank: int, causal: bool) -> Packed:
    starts = torch.tensor(starts, dtype=torch.int64, device="cpu")
    sizes = starts.diff() // (2 * ranks)  # chunk length per sequence
    first = torch.tensor([rank, 2 * ranks - 1 - rank], dtype=torch.int64, device="cpu")
    seen = first + 1 if causal else torch.full_like(first, 2 * ranks)
    keys = (sizes[:, None] * seen).flatten()
    sequence = _numbers(len(sizes)).repeat_interleave(2).repeat_interleave(keys)
    at = _numbers(len(sequence)) - _ends(keys)[:-1].repeat_interleave(keys)
    size = sizes[sequence]
    chunk = at // size
    mirrored = chunk >= ranks
    owner = torch.where(mirrored, 2 * ranks - 1 - chunk, chunk)
    place = starts[sequence] // ranks + mirrored * size + at % size
    return Packed(
        _ends(sizes.repeat_interleave(2)).int(),
        _ends(keys).int(),
        owner * (starts[-1] // ranks) + place,
    )


def _numbers(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int64, device="cpu")


def _ends(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
