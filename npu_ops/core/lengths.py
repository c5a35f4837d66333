"""Packed sequences: what lengths mean, in every op and on every device.

Lengths are `starts`, `[N + 1]` of int32 or int64: where N sequences start and the last one ends.
They begin with 0, never decrease, and end at the number of tokens or before it.

- Tokens behind the last sequence belong to nobody. Their outputs and gradients are 0, whatever the
  inputs hold there.
- Wrong lengths raise ValueError where they are in host memory. On a device nothing waits for them:
  outputs and gradients of all tokens are NaN, and no other memory is touched. States that are
  returned, and the gradients of first ones, are NaN; a pool of states stays as it is.

Host memory: `indices.starts_of`, csrc/common/indices.h. Devices: `nobodys` for what runs as torch
operators, `finish` of lengths_triton_ascend.py behind Triton kernels.
"""

from __future__ import annotations

import torch

from npu_ops.core import make


def are_right(starts: torch.Tensor, tokens: int | torch.Tensor) -> torch.Tensor:
    """Whether starts are right for so many tokens: a bool on their device."""
    return (starts[0] == 0) & (starts[-1] <= tokens) & (starts.diff() >= 0).all()


def pass_through(states, to, starts: torch.Tensor | None) -> None:
    """Write the states that sequences of a call without tokens leave: those they began with, or 0;
    NaN where starts are wrong. Also gradients of them, backwards. to: None if nobody wants them."""
    if to is None:
        return
    to.zero_() if states is None else to.copy_(states)
    if starts is not None and starts.device.type != "cpu":  # the host has looked at its own
        to.masked_fill_(~are_right(starts, 0), torch.nan)


def nobodys(starts: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens belong to nobody, and what their results are.

    Returns:
        bool `[tokens]`, all True where starts are wrong; and a number on starts' device, 0 or NaN.
    """
    right = are_right(starts, tokens)
    token = make.counted(tokens, device=starts.device)
    return (token >= starts[-1]) | ~right, torch.where(right, 0.0, torch.nan)


def before_conversion(call, **converted: bool):
    """The call, with zeros in arguments `[1, tokens, ...]` where tokens belong to nobody.

    converted: by an argument's name, whether PyTorch converts it before the operator runs. The
    conversion then has gradients of 0 at such tokens; 0 times NaN would be NaN, in sums over tokens
    too. Wrong starts change nothing, so that gradients become NaN.
    """
    starts, tokens = call.cu_seqlens, call.q.shape[1]
    given = {name: getattr(call, name) for name, is_so in converted.items() if is_so}
    given = {name: x for name, x in given.items() if x.requires_grad}
    if starts is None or not given or not torch.is_grad_enabled():
        return call
    behind = make.counted(tokens, device=starts.device) >= starts[-1]
    behind = behind & are_right(starts, tokens)

    def owned(x):
        return x.masked_fill(behind.view(1, -1, *[1] * (x.dim() - 2)), 0)

    return call._replace(**{name: owned(x) for name, x in given.items()})


def without_nobodys(starts: torch.Tensor | None, *rows: torch.Tensor | None) -> tuple:
    """Tensors `[1, tokens, ...]` with what tokens that belong to nobody have."""
    if starts is None:
        return rows
    given = next(x for x in rows if x is not None)
    behind, fill = nobodys(starts, given.shape[1])

    def masked(x):
        return torch.where(behind.view(1, -1, *[1] * (x.dim() - 2)), fill.to(x.dtype), x)

    return tuple(None if x is None else masked(x) for x in rows)
