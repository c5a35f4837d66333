"""Sequences over several ranks: the tokens before this rank's, which its first ones look at."""

from __future__ import annotations

import torch
from torch import distributed
from torch.nn import functional

from npu_ops.core import make, spans
from npu_ops.core.collective import all_gather


def initial_state(x, width: int, group):
    """The state `[B, D, W]` before this rank's span: the last W tokens of the ranks before it.

    A span may be shorter than that, so the tails of all of them are put together. Every rank of
    `group` calls this, also in the backward.
    """
    length = x.shape[1]
    kept = min(length, width)
    tail = functional.pad(x[:, length - kept :], (0, 0, width - kept, 0))
    counts = all_gather(torch.tensor([kept], device=x.device, dtype=torch.int64), group)
    states = _compose(all_gather(tail, group), counts[:, :, None, None])
    return states[distributed.get_rank(group)].transpose(1, 2)


def packed(x, width: int, cu_seqlens, group, layout: str):
    """The starts of this rank's parts of packed sequences, and the states `[N, D, W]` before them.

    Every rank of `group` calls this, also in the backward.
    """
    if layout == "zigzag":
        return _zigzag(x, width, cu_seqlens, group)
    span = spans.contiguous(cu_seqlens, x.shape[1], group)
    state = initial_state(x, width, group)
    of_this = width - make.counted(width, device=x.device) <= span.before  # no other sequence's
    state = torch.where(of_this, state, 0).transpose(1, 2)
    states = state.new_zeros((cu_seqlens.shape[0] - 1, *state.shape[1:]))
    return span.starts, states.index_copy(0, span.entering, state).transpose(1, 2)


def _zigzag(x, width: int, cu_seqlens, group):
    """The tail of each chunk, and what is before each."""
    starts = spans.zigzag(cu_seqlens, x.shape[1], group)
    begins, ends = starts[:-1, None].to(torch.int64), starts[1:, None].to(torch.int64)
    rows = ends - width + make.counted(width, device=x.device)  # [2 N, W]
    tokens = x[0] if x.shape[1] else x.new_zeros((1, x.shape[2]))
    tails = tokens[rows.clamp(0, tokens.shape[0] - 1)]
    tails = torch.where((rows >= begins)[..., None], tails, 0)
    counts = (ends - begins).clamp(0, width)[::2, :, None]  # all chunks of a sequence are alike
    tails = spans.in_order(tails, group)
    states = _compose(tails, counts.expand(tails.shape[0], -1, -1, -1))
    return starts, spans.of_rank(states, group).transpose(1, 2)


def _compose(tails, counts):
    """What is before every part: all of them, so that every rank's backward meets the others'.

    tails: `[parts, N, W, D]`, each part's last tokens, at the end. counts: how many those are.
    """
    states = [torch.zeros_like(tails[0])]
    row = make.counted(tails.shape[2], device=tails.device)[:, None]
    last = tails.shape[2] - 1
    for tail, count in zip(tails[:-1], counts[:-1], strict=True):
        before = (row + count).clamp(max=last).expand_as(tail)
        older = torch.gather(states[-1], 1, before)
        states.append(torch.where(row > last - count, tail, older))
    return torch.stack(states)
