"""Launch grids and tiles.

One program a core, which loops over the work; never one program per item of work, for more than
65535 programs hang or crash an Ascend NPU. Tiles are what fits the on-chip memory of one core.
"""

from __future__ import annotations

import torch

from npu_ops.core import hardware, socs


def vector_grid(items: int, device: torch.device) -> tuple[int]:
    """The grid of a vector kernel whose programs share `items` pieces of work; `items` > 0."""
    return (min(items, hardware.num_vector_cores(device)),)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least n; 1 for n <= 1."""
    return 1 << max(0, n - 1).bit_length()


def tile_elements(bytes_per_element: int) -> int:
    """The largest power of two of elements that fits a vector core's unified buffer.

    bytes_per_element: all that a kernel keeps on chip for an element, double buffers included.
    """
    # The smallest buffer of the SoCs, so that one tile serves all.
    fits = min(socs.UB_BYTES.values()) // bytes_per_element
    return 1 << (fits.bit_length() - 1)
