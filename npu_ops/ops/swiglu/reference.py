"""Reference of swiglu, in plain PyTorch: fp32, or fp64 with an fp64 input."""

from __future__ import annotations

import torch


def swiglu(gate, up):
    """Return silu(gate) * up, fp32 or fp64. If up is None, gate holds both, gate first."""
    gate, up = halves(gate, up)
    gate, up = _wide(gate), _wide(up)
    return gate * gate.sigmoid() * up


def swiglu_backward(grad, gate, up):
    """Return the gradients of gate and up, fp32 or fp64.

    If up is None, gate holds both: return the gradient of gate, and None.
    """
    first, second = halves(gate, up)
    grad, first, second = _wide(grad), _wide(first), _wide(second)
    # sigmoid(-z) is 1 - sigmoid(z). For a large z, the difference would be only rounding errors.
    slope = first.sigmoid() * (1 + first * (-first).sigmoid())
    grad_gate, grad_up = grad * second * slope, grad * (first * first.sigmoid())
    return (grad_gate, grad_up) if up is not None else (torch.cat([grad_gate, grad_up], -1), None)


def halves(gate, up):
    """Return views of gate and up, `[..., d]` each. If up is None, gate holds both."""
    return gate.chunk(2, -1) if up is None else (gate, up)


def _wide(x):
    return x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
