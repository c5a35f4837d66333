"""`npu-ops compile OP --suggest-tile`: finds a kernel's largest tile by compiling it.

A tile's sizes are the kernel's constexpr integers whose names begin with B; the first is the number
of rows. A larger tile gets more rows. A smaller tile gets fewer rows, then fewer columns.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from npu_ops_emulator import vendor

from npu_ops.core import cases as op_cases
from npu_ops.core.socs import UB_BYTES
from npu_ops_tools.compile.launches import Launch, launches
from npu_ops_tools.compile.report import compile_launch

LARGEST = 1 << 16  # elements of a tile
SMALLEST = 1 << 4


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """The largest tile with which a kernel has no fault, for every case, dtype and SoC.

    launched: the largest tile that the op launches the kernel with now, in elements.
    tile: the suggested tile, in elements.
    bytes_per_element: argument of `tile_elements` for tiles of that size.
    launches: number of launches compiled.
    """

    kernel: str
    launched: int
    tile: int
    bytes_per_element: int
    launches: int


def suggest(
    op: str, cases: Sequence[str] | None, dtypes, socs: Sequence[str]
) -> Iterator[Suggestion]:
    """Yield a suggestion for each tiled kernel that the cases launch (default: representative
    cases)."""
    kernels: dict[str, list[tuple[Launch, str]]] = {}
    cases = cases or op_cases.of(op).REPRESENTATIVE
    for soc in socs:
        for launch in launches(op, cases, dtypes, soc):
            if _sizes(launch):
                kernels.setdefault(launch.name, []).append((launch, soc))
    for kernel, launched in kernels.items():
        tile = LARGEST
        while tile >= SMALLEST and not all(_fits(*each, tile) for each in launched):
            tile //= 2
        if tile >= SMALLEST:
            needs = min(UB_BYTES.values()) // tile
            now = max(math.prod(_sizes(launch).values()) for launch, _ in launched)
            yield Suggestion(kernel, now, tile, needs, len(launched))


def _sizes(launch: Launch) -> dict[str, int]:
    return {
        name: value
        for name, value in launch.constants
        if name.startswith("B") and type(value) is int and value > 0
    }


def _resized(sizes: dict[str, int], tile: int) -> dict[str, int]:
    """Return sizes whose product is `tile`. All must be powers of 2."""
    sizes = dict(sizes)
    rows = next(iter(sizes))
    while math.prod(sizes.values()) < tile:
        sizes[rows] *= 2
    while math.prod(sizes.values()) > tile:
        sizes[next(name for name, size in sizes.items() if size > 1)] //= 2
    return sizes


def _fits(launch: Launch, soc: str, tile: int) -> bool:
    sizes = _resized(_sizes(launch), tile)
    constants = tuple((dict(launch.constants) | sizes).items())
    try:
        return not compile_launch(dataclasses.replace(launch, constants=constants), soc).faults()
    except vendor.CompileError:
        return False
