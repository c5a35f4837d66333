"""Context parallelism: gathers the last tokens of earlier ranks, which this rank's filter needs."""

from __future__ import annotations

import torch
from torch import distributed
from torch.nn import functional

from npu_ops.core import make, spans
from npu_ops.core.collective import all_gather


def initial_state(x, width: int, group):
    """Return the state `[B, D, W]` before this rank's tokens: the last W tokens of earlier ranks.

    A rank may have fewer than W tokens, so the last tokens of all ranks are combined. Every rank of
    `group` must call this function and run its backward.
    """
    length = x.shape[1]
    kept = min(length, width)
    tail = functional.pad(x[:, length - kept :], (0, 0, width - kept, 0))
    counts = all_gather(torch.tensor([kept], device=x.device, dtype=torch.int64), group)
    states = _compose(all_gather(tail, group), counts[:, :, None, None])
    return states[distributed.get_rank(group)].transpose(1, 2)


def packed(x, width: int, cu_seqlens, group, layout: str):
    """Return the starts of this rank's parts of packed sequences, and the states before them.

    The states are `[N, D, W]`, for zigzag `[2 N, D, W]`.

    Every rank of `group` must call this function and run its backward.
    """
    if layout == "zigzag":
        return _zigzag(x, width, cu_seqlens, group)
    span = spans.contiguous(cu_seqlens, x.shape[1], group)
    state = initial_state(x, width, group)
    # Exclude tokens that belong to another sequence.
    of_this = width - make.counted(width, device=x.device) <= span.before
    state = torch.where(of_this, state, 0).transpose(1, 2)
    states = state.new_zeros((cu_seqlens.shape[0] - 1, *state.shape[1:]))
    return span.starts, states.index_copy(0, span.entering, state).transpose(1, 2)


def _zigzag(x, width: int, cu_seqlens, group):
    """Return the starts of this rank's chunks, and the states before them."""
    starts = spans.zigzag(cu_seqlens, x.shape[1], group)
    begins, ends = starts[:-1, None].to(torch.int64), starts[1:, None].to(torch.int64)
    rows = ends - width + make.counted(width, device=x.device)  # [2 N, W]
    tokens = x[0] if x.shape[1] else x.new_zeros((1, x.shape[2]))
    tails = tokens[rows.clamp(0, tokens.shape[0] - 1)]
    tails = torch.where((rows >= begins)[..., None], tails, 0)
    # all chunks of a sequence have the same length
    counts = (ends - begins).clamp(0, width)[::2, :, None]
    tails = spans.in_order(tails, group)
    states = _compose(tails, counts.expand(tails.shape[0], -1, -1, -1))
    return starts, spans.of_rank(states, group).transpose(1, 2)


def _compose(tails, counts):
    """Return the states `[parts, N, W, D]` before every part.

    Every rank computes all of them, because the backward is collective.

    tails: `[parts, N, W, D]`: the last tokens of each part, right-aligned along W.
    counts: how many of the W rows are tokens.
    """
    states = [torch.zeros_like(tails[0])]
    row = make.counted(tails.shape[2], device=tails.device)[:, None]
    last = tails.shape[2] - 1
    for tail, count in zip(tails[:-1], counts[:-1], strict=True):
        before = (row + count).clamp(max=last).expand_as(tail)
        older = torch.gather(states[-1], 1, before)
        states.append(torch.where(row > last - count, tail, older))
    return torch.stack(states)
