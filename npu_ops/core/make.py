"""Constructors of tensors with an explicit dtype and device, independent of torch's defaults.

Model loaders change both defaults: `torch.set_default_dtype(torch.bfloat16)`, `with
torch.device("meta")`.
"""

from __future__ import annotations

import torch


def counted(*span: int, device="cpu") -> torch.Tensor:
    """Return consecutive int64 numbers: `counted(end)` or `counted(begin, end)`."""
    return torch.arange(*span, dtype=torch.int64, device=device)


def indices(values) -> torch.Tensor:
    """Return an int64 tensor of the values, on the CPU."""
    return torch.tensor(values, dtype=torch.int64, device="cpu")


# Random numbers are drawn on the CPU, so that a seed gives the same numbers for every device.


def normal(shape, draw: torch.Generator) -> torch.Tensor:
    """Draw fp32 numbers of the standard normal distribution."""
    return torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu")


def uniform(shape, draw: torch.Generator) -> torch.Tensor:
    """Draw fp32 numbers in [0, 1)."""
    return torch.rand(shape, generator=draw, dtype=torch.float32, device="cpu")


def integers(end: int, shape, draw: torch.Generator) -> torch.Tensor:
    """Draw int64 numbers in [0, end)."""
    return torch.randint(end, shape, generator=draw, dtype=torch.int64, device="cpu")


def shuffled(end: int, draw: torch.Generator) -> torch.Tensor:
    """Return the int64 numbers 0 to end - 1 in random order."""
    return torch.randperm(end, generator=draw, dtype=torch.int64, device="cpu")
