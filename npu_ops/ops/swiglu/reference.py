"""The definition of swiglu, in plain PyTorch: fp32, or fp64 with an fp64 input."""

from __future__ import annotations

import torch


def swiglu(gate, up):
    """silu(gate) * up, wide; up may be None: then it is the second half of gate."""
    gate, up = halves(gate, up)
    gate, up = _wide(gate), _wide(up)
    return gate * gate.sigmoid() * up


def swiglu_backward(grad, gate, up):
    """The gradients of gate and up, wide; of both in one, and None, where up is None."""
    first, second = halves(gate, up)
    grad, first, second = _wide(grad), _wide(first), _wide(second)
    # 1 - sigmoid(z) is sigmoid(-z): the difference would be all rounding where z is large.
    slope = first.sigmoid() * (1 + first * (-first).sigmoid())
    grad_gate, grad_up = grad * second * slope, grad * (first * first.sigmoid())
    return (grad_gate, grad_up) if up is not None else (torch.cat([grad_gate, grad_up], -1), None)


def halves(gate, up):
    """Views of both, `[..., d]`; up may be None: then gate has it behind it."""
    return gate.chunk(2, -1) if up is None else (gate, up)


def _wide(x):
    return x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
