"""Exchanges tokens and heads between ranks for Ulysses, verl's sequence parallelism.

Each rank has a part of the tokens, with all heads. Layers that mix tokens need all tokens, so each
rank exchanges its part for all tokens of some heads. verl makes this exchange only inside its flash
attention function, and only if a model passes position_ids; a vision tower passes none. Any other
attention function must make the exchange itself, or it attends only to this rank's tokens.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

_MODULE = "verl.utils.ulysses"


def size() -> int:
    """Return the number of ranks that share a sequence; without verl it is 1."""
    verl = sys.modules.get(_MODULE)
    return verl.get_ulysses_sequence_parallel_world_size() if verl else 1


def rank() -> int:
    """Return this rank's number among the ranks that share a sequence."""
    return sys.modules[_MODULE].get_ulysses_sequence_parallel_rank()


def gather_tokens(x: torch.Tensor, tokens: int, heads: int) -> torch.Tensor:
    """All-to-all: from all heads of this rank's tokens to all tokens of this rank's heads.

    tokens, heads: the indices of these dimensions of x.
    """
    return sys.modules[_MODULE].gather_seq_scatter_heads(x, seq_dim=tokens, head_dim=heads)


def gather_heads(x: torch.Tensor, tokens: int, heads: int) -> torch.Tensor:
    """All-to-all: from all tokens of this rank's heads to all heads of this rank's tokens."""
    return sys.modules[_MODULE].gather_heads_scatter_seq(x, head_dim=heads, seq_dim=tokens)


def starts(position_ids: torch.Tensor) -> torch.Tensor:
    """Return cu_seqlens of all tokens: a sequence starts where the positions jump.

    position_ids: `[1, T / ranks]`, those of this rank's tokens. Each layer gathers them again, as
    verl's flash attention does.
    """
    spans = [torch.empty_like(position_ids) for _ in range(size())]
    group = sys.modules[_MODULE].get_ulysses_sequence_parallel_group()
    dist.all_gather(spans, position_ids.contiguous(), group=group)
    positions = torch.cat(spans, dim=-1).flatten()
    jumps = (positions.diff() != 1).nonzero().flatten() + 1
    ends = [jumps.new_full((1,), n) for n in (0, positions.numel())]
    return torch.cat((ends[0], jumps, ends[1])).to(torch.int32)


def with_enough_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat the heads of keys or values until each rank has one, as verl does."""
    return x.repeat_interleave(max(size() // x.shape[heads], 1), dim=heads)
