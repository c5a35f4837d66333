"""Packed sequences: the meaning of lengths in every op and on every device.

Lengths are given as `starts`, int32 or int64 `[N + 1]`: the start of each of N sequences, then the
end of the last. They begin with 0, never decrease, and end at or before the number of tokens.

- Tokens after the last sequence belong to no sequence. Their outputs and gradients are 0, whatever
  the inputs hold there.
- Invalid lengths raise ValueError if they are in host memory. On a device, npu-ops does not wait to
  check them: outputs and gradients of all tokens are NaN, and no other memory is touched. Returned
  states and gradients of initial states are NaN; a pool of states stays unchanged.

In host memory, `indices.starts_of` and csrc/common/indices.h check the starts. On devices, PyTorch
code uses `nobodys`, and `finish` of lengths_triton_ascend.py runs after Triton kernels.
"""

from __future__ import annotations

import torch

from npu_ops.core import make


def are_right(starts: torch.Tensor, tokens: int | torch.Tensor) -> torch.Tensor:
    """Return whether starts are valid for this many tokens: a bool tensor on their device."""
    return (starts[0] == 0) & (starts[-1] <= tokens) & (starts.diff() >= 0).all()


def pass_through(states, to, starts: torch.Tensor | None) -> None:
    """Write the final states of a call without tokens to `to`.

    The final states are the initial states, 0 without initial states, or NaN if starts are invalid.
    Backward passes call this function for gradients of states, too.

    states: initial states, or None. to: tensor to write; None if the caller needs no final states.
    """
    if to is None:
        return
    to.zero_() if states is None else to.copy_(states)
    if starts is not None and starts.device.type != "cpu":  # host values are checked already
        to.masked_fill_(~are_right(starts, 0), torch.nan)


def nobodys(starts: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which tokens are after the last sequence, and the value of their results.

    Returns:
        bool `[tokens]`, all True if starts are invalid; and a scalar on starts' device, 0 or NaN.
    """
    right = are_right(starts, tokens)
    token = make.counted(tokens, device=starts.device)
    return (token >= starts[-1]) | ~right, torch.where(right, 0.0, torch.nan)


def before_conversion(call, **converted: bool):
    """Set tokens after the last sequence to 0 in arguments that PyTorch converts for the operator.

    call: NamedTuple of the public arguments, with `q` and `cu_seqlens`; a changed copy is returned.
    converted: argument name -> whether PyTorch converts it, e.g. by an l2norm or a gate. Arguments
    without a gradient stay as they are.

    Such a token may hold NaN. In the conversion's backward, a gradient of 0 times this NaN would be
    NaN, and so would sums over tokens. With invalid starts nothing is zeroed, so gradients become
    NaN.
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
    """Set tokens after the last sequence to 0, or all tokens to NaN if starts are invalid.

    rows: tensors `[1, tokens, ...]`, or None.
    """
    if starts is None:
        return rows
    given = next(x for x in rows if x is not None)
    behind, fill = nobodys(starts, given.shape[1])

    def masked(x):
        return torch.where(behind.view(1, -1, *[1] * (x.dim() - 2)), fill.to(x.dtype), x)

    return tuple(None if x is None else masked(x) for x in rows)
