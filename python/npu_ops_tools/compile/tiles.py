"""`npu-ops compile OP --suggest-tile`: how large a kernel's tile may be, by compiling it.

A tile's sizes are the kernel's constexpr integers whose names begin with B. The first of them, of
rows, is doubled while the kernel fits; if it does not fit at first, the largest is halved.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from npu_ops_emulator import vendor

from npu_ops.core.socs import ub_bytes
from npu_ops_tools.compile.launches import Launch, launches
from npu_ops_tools.compile.report import compile_launch

LARGEST = 1 << 16  # elements of a tile


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """tile: the most elements that fit. bytes_per_element: what `tile_elements` is to be told for
    tiles of that size."""

    kernel: str
    case: str
    launched: int
    tile: int
    bytes_per_element: int


def suggest(op: str, cases: list[str] | None, dtypes, soc: str) -> Iterator[Suggestion]:
    """One for each kernel with a tile that the cases launch."""
    for launch in launches(op, cases, dtypes, soc):
        sizes = _sizes(launch)
        if not sizes:
            continue
        fits = _largest(launch, sizes, soc)
        if fits:
            tile = math.prod(fits.values())
            needs = ub_bytes(soc) // tile
            yield Suggestion(launch.name, launch.case, math.prod(sizes.values()), tile, needs)


def _sizes(launch: Launch) -> dict[str, int]:
    return {
        name: value
        for name, value in launch.constants
        if name.startswith("B") and type(value) is int and value > 0
    }


def _largest(launch: Launch, sizes: dict[str, int], soc: str) -> dict[str, int] | None:
    rows = next(iter(sizes))
    while not _fits(launch, sizes, soc):
        widest = max(sizes, key=sizes.__getitem__)
        if sizes[widest] == 1:
            return None
        sizes = sizes | {widest: sizes[widest] // 2}
    while math.prod(sizes.values()) < LARGEST:
        larger = sizes | {rows: 2 * sizes[rows]}
        if not _fits(launch, larger, soc):
            break
        sizes = larger
    return sizes


def _fits(launch: Launch, sizes: dict[str, int], soc: str) -> bool:
    constants = tuple((dict(launch.constants) | sizes).items())
    try:
        return not compile_launch(dataclasses.replace(launch, constants=constants), soc).faults()
    except vendor.CompileError:
        return False
