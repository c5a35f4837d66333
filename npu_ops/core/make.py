"""New tensors of the dtype and the device that are named here, whatever torch's defaults are.

A model loader sets both: `torch.set_default_dtype(torch.bfloat16)`, `with torch.device("meta")`.
"""

from __future__ import annotations

import torch


def counted(*span: int, device="cpu") -> torch.Tensor:
    """int64 numbers in a row: `counted(end)` or `counted(begin, end)`."""
    return torch.arange(*span, dtype=torch.int64, device=device)


def indices(values) -> torch.Tensor:
    """int64 numbers, on the CPU."""
    return torch.tensor(values, dtype=torch.int64, device="cpu")


# Draws on the CPU, so that a seed gives the same numbers for every device.


def normal(shape, draw: torch.Generator) -> torch.Tensor:
    """fp32 numbers of the normal distribution."""
    return torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu")


def uniform(shape, draw: torch.Generator) -> torch.Tensor:
    """fp32 numbers from 0 to 1."""
    return torch.rand(shape, generator=draw, dtype=torch.float32, device="cpu")


def integers(end: int, shape, draw: torch.Generator) -> torch.Tensor:
    """int64 numbers from 0 on, below `end`."""
    return torch.randint(end, shape, generator=draw, dtype=torch.int64, device="cpu")


def shuffled(end: int, draw: torch.Generator) -> torch.Tensor:
    """int64: the numbers below `end` in some order."""
    return torch.randperm(end, generator=draw, dtype=torch.int64, device="cpu")
