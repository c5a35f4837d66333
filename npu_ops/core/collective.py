"""torch.distributed: whether it is initialized, and an all_gather with a gradient."""

from __future__ import annotations

import torch
from torch import distributed

in_a_group = getattr(distributed, "is_initialized", bool)  # torch may be built without distributed


def all_gather(x: torch.Tensor, group) -> torch.Tensor:
    """Return `[ranks, ...]`: the `x` of every rank. `x` must have the same shape on all ranks.

    All ranks must run the backward too: it contains an all_reduce.
    """
    return _AllGather.apply(x, group)


class _AllGather(torch.autograd.Function):
    """all_gather; its gradient is this rank's slice of the gradient summed over all ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        out = x.new_empty((distributed.get_world_size(group), *x.shape))
        distributed.all_gather(list(out.unbind()), x.contiguous(), group)
        return out

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(grad, group=ctx.group)
        return grad[distributed.get_rank(ctx.group)], None
