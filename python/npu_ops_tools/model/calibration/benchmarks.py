"""Lists the microbenchmarks, launches them, and measures their times on an NPU."""

from __future__ import annotations

import dataclasses
import importlib
import statistics
from collections.abc import Callable, Iterator

import torch

BYTES = 8 << 20  # bytes of a copy that fits the cache
BEYOND = 256 << 20  # bytes of a copy that exceeds the cache
STRIDE = 512  # elements between rows in copies of short bursts
TIMES = 2048  # additions to one tile
TILE = 16384  # elements of a copy's tile
RUNS = 30


@dataclasses.dataclass(frozen=True)
class Microbenchmark:
    """A kernel launch to time.

    group: the cost that it measures.
    make: allocates tensors on a device, returns the function that launches the kernel.
    """

    group: str
    name: str
    make: Callable[[torch.device], Callable[[], object]]


def of(cube: int, vector: int) -> list[Microbenchmark]:
    """Return the microbenchmarks of an SoC with these numbers of cores."""
    some = sorted({1, vector // 2, vector, 4 * vector, 16 * vector})
    found = [Microbenchmark("launch by blocks", f"{n} programs", _blocks(n)) for n in some]
    for cores in (1, 4, vector // 2, vector):
        found.append(Microbenchmark("copy by cores", f"{cores} cores", _copy(BYTES, cores)))
    beyond = f"{vector} cores, beyond the cache"
    found.append(Microbenchmark("copy by cores", beyond, _copy(BEYOND, vector)))
    for width in (16, 64, 256):
        name = f"{2 * width} bytes a burst"
        found.append(Microbenchmark("copy by bursts", name, _bursts(width, vector)))
    for block in (512, 4096):
        name = f"{block // 64} repeats"
        found.append(Microbenchmark("add by repeats", name, _add(block, vector)))
    for inner in (512, 4096):
        found.append(Microbenchmark("matmul by shape", f"K {inner}", _matmul(inner, cube)))
    found.append(Microbenchmark("fixpipe", "K 64", _matmul(64, cube)))
    return found


def measure(device: torch.device) -> list[dict]:
    """Return {"group", "name", "us"} of each: the median time with a warm cache."""
    from npu_ops.core import hardware

    backend = getattr(torch, device.type)
    cores = hardware.num_cube_cores(device), hardware.num_vector_cores(device)
    return [
        {"group": one.group, "name": one.name, "us": _median(one.make(device), backend, device)}
        for one in of(*cores)
    ]


def _median(run: Callable[[], object], backend, device: torch.device) -> float:
    for _ in range(3):
        run()
    busy = torch.zeros((512, 512), dtype=torch.float32, device=device)
    taken = []
    for _ in range(RUNS):
        begin, end = (backend.Event(enable_timing=True) for _ in range(2))
        for _ in range(8):  # keeps the device busy, so that the host runs ahead
            torch.mm(busy, busy)
        begin.record()
        run()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(taken)


def _kernels():
    """Import the kernels when they are launched: triton is not a dependency."""
    return importlib.import_module("npu_ops_tools.model.calibration.kernels")


def _blocks(programs: int):
    def make(device):
        out = _empty((programs, 64), device, torch.float32)
        return lambda: _kernels().blocks[(programs,)](out, BLOCK=64)

    return make


def _copy(size: int, cores: int):
    def make(device):
        x, out = _both((size // 2,), device)
        return lambda: _kernels().copy[(cores,)](x, out, size // 2, BLOCK=TILE)

    return make


def _bursts(width: int, cores: int):
    rows = BYTES // (2 * STRIDE)

    def make(device):
        x, out = _both((rows, STRIDE), device)
        tall = min(4096 // width, 64)
        return lambda: _kernels().bursts[(cores,)](x, out, rows, STRIDE, R=tall, W=width)

    return make


def _add(block: int, cores: int):
    def make(device):
        x, out = _both((cores, block), device, torch.float32)
        return lambda: _kernels().add[(cores,)](x, out, TIMES, BLOCK=block)

    return make


def _matmul(inner: int, cores: int, m: int = 128, n: int = 128):
    tiles = 8 * cores

    def make(device):
        a, b = _empty((tiles * m, inner), device), _empty((inner, n), device)
        out = _empty((tiles * m, n), device)
        sizes = {"M": m, "N": n, "BK": 64}
        return lambda: _kernels().matmul[(cores,)](a, b, out, tiles, inner, **sizes)

    return make


def _both(shape, device, dtype=torch.bfloat16) -> Iterator[torch.Tensor]:
    return (_empty(shape, device, dtype) for _ in range(2))


def _empty(shape, device, dtype=torch.bfloat16) -> torch.Tensor:
    """Return a tensor of zeros. Times do not depend on the values, unless there are NaNs."""
    return torch.zeros(shape, dtype=dtype, device=device)
