"""torch.distributed: whether it is in use, and collectives with a gradient."""

from __future__ import annotations

import torch
from torch import distributed

in_a_group = getattr(distributed, "is_initialized", bool)  # torch may be built without it


def all_gather(x: torch.Tensor, group) -> torch.Tensor:
    """`[ranks, ...]` of every rank's `x`, which has one shape on all; each rank goes backward."""
    return _AllGather.apply(x, group)


class _AllGather(torch.autograd.Function):
    """The gradient is the sum of what all ranks have for it."""

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
