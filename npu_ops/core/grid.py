"""Launch grids and tile sizes.

A grid has at most one program per NPU core (8 per multiprocessor of a GPU), and each program loops
over work items. One program per item is not safe: more than 65535 programs hang or crash an Ascend
NPU. A tile is as large as fits the on-chip memory of one core.
"""

from __future__ import annotations

import torch

from npu_ops.core import hardware, socs


def vector_grid(items: int, device: torch.device) -> tuple[int]:
    """Return the grid of a vector kernel whose programs share `items` > 0 pieces of work."""
    return (min(items, hardware.num_vector_cores(device)),)


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is at least n; 1 for n <= 1."""
    return 1 << max(0, n - 1).bit_length()


def tile_elements(bytes_per_element: int) -> int:
    """Return the largest power-of-two number of elements that fits a vector core's unified buffer.

    bytes_per_element: all on-chip bytes that a kernel needs per element, double buffers included.
    """
    # Use the smallest buffer of all SoCs, so that one tile size works on each.
    fits = min(socs.UB_BYTES.values()) // bytes_per_element
    return 1 << (fits.bit_length() - 1)
