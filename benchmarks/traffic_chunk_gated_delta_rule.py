"""Count the bytes per token of the chunked gated delta rule, forward and backward.

    npu-ops emulate -- python benchmarks/traffic_chunk_gated_delta_rule.py

For global memory, the script counts the loads and stores of the kernels on the emulated NPU, and
the inputs and outputs of the torch operators between them. The result is the difference between
1024 and 512 tokens, so that constant parts cancel. For workspace, the script counts tiles in the
vendor compiler's output. The first kind passes between matrix unit and vector cores, and is written
and read once. The matrix unit keeps the second kind for its own next product. "normalized" rows are
with use_qk_l2norm_in_kernel.
"""

from __future__ import annotations

import collections
import csv
import importlib
import math
import pathlib
import re
import sys

import torch
import triton  # noqa: F401, I001  (first: the emulated NPU patches it when it is imported)
from npu_ops_emulator import triton_driver, vendor
from npu_ops_tools.compile import hivm
from torch.utils._python_dispatch import TorchDispatchMode

import npu_ops
from npu_ops.core import registry
from npu_ops.ops.chunk_gated_delta_rule import op

HEADS, VALUE_HEADS, DIM, CHUNK = 16, 32, 128, 64
PASSES = ("forward", "backward")
FIELDS = ("pass", "kernel", "loaded", "stored", "workspace", "matrix_unit")
RESULTS = pathlib.Path(__file__).parent / "results" / "traffic" / "npu-emulated.csv"


class Glue(TorchDispatchMode):
    """Add up the bytes that torch's own operators read and write."""

    def __init__(self):
        super().__init__()
        self.loaded = self.stored = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and not func.is_view and "empty" not in func.__name__:
            self.loaded += sum(map(_bytes, args))
            self.stored += sum(map(_bytes, out if isinstance(out, (tuple, list)) else (out,)))
        return out


def _bytes(x) -> int:
    if isinstance(x, (tuple, list)):
        return sum(map(_bytes, x))
    return x.nbytes if isinstance(x, torch.Tensor) else 0


def moved(tokens: int, normalize: bool) -> dict[tuple[str, str], tuple[int, int]]:
    """Return the bytes loaded and stored by (pass, kernel)."""
    forward, backward = (name + " normalized" * normalize for name in PASSES)
    draw = torch.Generator().manual_seed(0)
    shapes = [(HEADS, DIM), (HEADS, DIM), (VALUE_HEADS, DIM)]
    q, k, v = (torch.randn((1, tokens, *s), generator=draw).bfloat16().npu() for s in shapes)
    g, beta = (torch.rand((1, tokens, VALUE_HEADS), generator=draw).npu() for _ in range(2))
    inputs = (q, k, v, -g, beta, None, None, DIM**-0.5, CHUNK, False, normalize)
    found = {}
    # without torch's dispatcher, which would hide the operators inside
    with counted(forward, found):
        o, _ = op.forward.run(*inputs, False)
    grad = torch.ones_like(o)
    with counted(backward, found):
        op.backward.run(grad, None, *inputs)
    return found


class counted:
    """In a block, count the bytes loaded and stored: `found[name, kernel]` gets both numbers."""

    def __init__(self, name: str, found: dict):
        self.name, self.found, self.glue = name, found, Glue()

    def __enter__(self):
        triton_driver.reset_statistics()
        self.glue.__enter__()

    def __exit__(self, *error):
        self.glue.__exit__(*error)
        for kernel, seen in triton_driver.statistics().items():
            self.found[self.name, kernel] = seen.bytes_loaded, seen.bytes_stored
        self.found[self.name, "torch operators"] = self.glue.loaded, self.glue.stored


def workspaces(normalize: bool) -> dict[str, tuple[float, float]]:
    """Return the workspace bytes per token, by kernel.

    The first number is passed between matrix unit and vector cores; the matrix unit keeps the
    second for itself.
    """
    launches = importlib.import_module("npu_ops_tools.compile.launches")
    sizes = [(HEADS, DIM), (HEADS, DIM), (VALUE_HEADS, DIM)]
    inputs = [torch.randn(1, CHUNK, *s, dtype=torch.bfloat16) for s in sizes]
    inputs += [-torch.rand(1, CHUNK, VALUE_HEADS), torch.rand(1, CHUNK, VALUE_HEADS)]
    inputs = [x.requires_grad_() for x in inputs]
    with launches.recorded("traffic") as found, registry.as_if_on("npu"):
        o, _ = npu_ops.chunk_gated_delta_rule(
            *inputs, chunk_size=CHUNK, use_qk_l2norm_in_kernel=normalize
        )
        torch.autograd.grad(o, inputs, torch.ones_like(o))
    return {launch.name: tuple(2 * n / CHUNK for n in _workspace(launch)) for launch in found}


def _workspace(launch) -> tuple[int, int]:
    """Return bytes per chunk: of tiles that both units use, and of the matrix unit's own tiles."""
    options = dict(launch.options)
    signature, constants = dict(launch.signature), dict(launch.constants)
    text = vendor.lower(launch.kernel, signature, constants, vendor.SOCS[0], **options)
    made, _ = vendor.compile(launch.name, text, vendor.SOCS[0], **options)
    matrix, vector = (_tiles(launch.name, made, half) for half in ("aic", "aiv"))
    return tuple(VALUE_HEADS * _size(tiles) for tiles in (matrix & vector, matrix - vector))


def _tiles(kernel: str, made: str, half: str) -> collections.Counter:
    """Return the workspace tiles in the matrix unit's or the vector cores' half of a kernel."""
    functions = [f for f in hivm.functions(made) if f"@{kernel}_mix_{half}" in f]
    return collections.Counter(
        re.findall(
            r"memref\.view .*? to memref<((?:\d+x)+)(\w+), #hivm.address_space<gm>>",
            "".join(functions),
        )
    )


def _size(tiles: collections.Counter) -> int:
    return sum(
        # The last two dimensions are a tile's; a dimension before them counts buffers.
        count * hivm.BYTES[dtype] * math.prod(map(int, shape.split("x")[-3:-1]))
        for (shape, dtype), count in tiles.items()
    )


def table(normalize: bool) -> list[list]:
    """Return the rows of the CSV file: one for each kernel, and one with each pass's total."""
    small, large = moved(512, normalize), moved(1024, normalize)
    through = workspaces(normalize)
    rows = []
    for (name, kernel), (loaded, stored) in large.items():
        before = small.get((name, kernel), (0, 0))
        rows.append([name, kernel, (loaded - before[0]) / 512, (stored - before[1]) / 512,
                     *through.get(kernel, (0, 0))])  # fmt: skip
    for name in dict.fromkeys(row[0] for row in rows):
        of_pass = [row[2:] for row in rows if row[0] == name]
        rows.append([name, "all", *map(sum, zip(*of_pass, strict=True))])
    return rows


def main() -> None:
    rows = table(normalize=False) + table(normalize=True)
    with RESULTS.open("w", newline="") as file:
        csv.writer(file).writerows([FIELDS, *rows])
    for row in rows:
        print(f"{row[0]:20}{row[1]:26}" + "".join(f"{x:12,.0f}" for x in row[2:]), file=sys.stdout)


if __name__ == "__main__":
    main()
