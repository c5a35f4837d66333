"""Ulysses, verl's sequence parallelism: each rank has a span of the tokens, outside of the layers
that look from one token to another; there it has all tokens of some heads.

verl exchanges the two inside of the function of flash attention alone, and only where a model
passes position_ids, which its vision tower does not. Any other function of attention computes
within the span unless it does the same.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

_MODULE = "verl.utils.ulysses"


def size() -> int:
    """The number of ranks that a sequence is spread over."""
    verl = sys.modules.get(_MODULE)
    return verl.get_ulysses_sequence_parallel_world_size() if verl else 1


def rank() -> int:
    """This one's, of those."""
    return sys.modules[_MODULE].get_ulysses_sequence_parallel_rank()


def gather_tokens(x: torch.Tensor, tokens: int, heads: int) -> torch.Tensor:
    """All tokens of this rank's share of the heads, in dimensions `tokens` and `heads`."""
    return sys.modules[_MODULE].gather_seq_scatter_heads(x, seq_dim=tokens, head_dim=heads)


def gather_heads(x: torch.Tensor, tokens: int, heads: int) -> torch.Tensor:
    """All heads of this rank's span of the tokens."""
    return sys.modules[_MODULE].gather_heads_scatter_seq(x, head_dim=heads, seq_dim=tokens)


def starts(position_ids: torch.Tensor) -> torch.Tensor:
    """cu_seqlens of all tokens, from the positions of this span: one starts where they jump.

    position_ids: `[1, T]`. Each layer asks again, as flash attention's does.
    """
    spans = [torch.empty_like(position_ids) for _ in range(size())]
    group = sys.modules[_MODULE].get_ulysses_sequence_parallel_group()
    dist.all_gather(spans, position_ids.contiguous(), group=group)
    positions = torch.cat(spans, dim=-1).flatten()
    jumps = (positions.diff() != 1).nonzero().flatten() + 1
    ends = [jumps.new_full((1,), n) for n in (0, positions.numel())]
    return torch.cat((ends[0], jumps, ends[1])).to(torch.int32)


def with_enough_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Keys' or values' heads repeated until each rank has one, as verl does."""
    return x.repeat_interleave(max(size() // x.shape[heads], 1), dim=heads)
