"""One sequence over several ranks: the tokens before this rank's, which its first ones look at."""

from __future__ import annotations

import torch
from torch import distributed
from torch.nn import functional

from npu_ops.core import make
from npu_ops.core.collective import all_gather


def initial_state(x, width: int, group):
    """The state `[B, D, W]` before this rank's span: the last W tokens of the ranks before it.

    A span may be shorter than that, so the tails of all of them are put together. Every rank of
    `group` calls this, also in the backward.
    """
    length = x.shape[1]
    kept = min(length, width)
    tail = functional.pad(x[:, length - kept :], (0, 0, 0, width - kept))
    tails = all_gather(tail, group)
    counts = all_gather(torch.tensor([kept], device=x.device, dtype=torch.int64), group)
    return _compose(tails, counts)[distributed.get_rank(group)].transpose(1, 2)


def _compose(tails, counts):
    """What is before every span: all of them, so that every rank's backward meets the others'."""
    states = [torch.zeros_like(tails[0])]
    row = make.counted(tails.shape[2], device=tails.device)
    for tail, count in zip(tails[:-1], counts[:-1], strict=True):
        states.append(torch.cat([states[-1], tail], 1).index_select(1, count + row))
    return torch.stack(states)
