"""Activations in Triton, for Ascend and NVIDIA.

If exp(-z) overflows to infinity, the result is 0. On Ascend, `-z` takes two instructions, and
`z * -1.0` takes one.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(z):
    """Return 1 / (1 + exp(-z)) for fp32 z of any shape."""
    return 1.0 / (1.0 + tl.exp(z * -1.0))


@triton.jit
def silu(z):
    """Return z / (1 + exp(-z)) for fp32 z of any shape. It rounds once less than z * sigmoid(z)."""
    return z / (1.0 + tl.exp(z * -1.0))
