"""Compares tile operations on PTO-ISA's CPU simulator with those on npu-ops' emulated NPU core.

python tests/emulator/upstream_pto.py PTO_ISA

PTO_ISA is a checkout of upstream's repository; none of its files is changed or copied. PTO-ISA
implements each operation twice: in C++ for a CPU, and in Ascend910B's instructions. csrc/twin runs
these instructions on the CPU. Operands and the numbers of valid rows and columns are random. The
results must be equal, within 4 eps for exp, log and sqrt. The script prints the differences; the
exit status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import pathlib
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import numpy as np
from npu_ops_emulator import build, twins

SOURCE = pathlib.Path(__file__).parent / "kernels" / "pto_tiles.cpp"
ROWS, COLUMNS, TRIES = 16, 64, 6
KINDS = {"float": np.float32, "half": np.float16, "int32": np.int32, "int16": np.int16}
FLOATS, ALL = ("float", "half"), tuple(KINDS)
OPERATIONS = (
    "add sub mul div max min add_scalar mul_scalar max_scalar min_scalar exp log sqrt abs neg relu "
    "row_sum row_max row_min column_sum column_max column_min row_expand column_expand fill count "
    "to_half to_float to_integer compare_scalar select gather gather_blocks keep transpose"
).split()
# The simulator's TCVT uses its rounding mode only for integers: to nearest, away from 0, down, up,
# towards 0.
ROUNDINGS, NEAREST = (1, 2, 3, 4, 5), (1,)
PATTERNS, COMPARISONS = range(1, 8), range(6)


def cases() -> Iterator[tuple[str, str, int]]:
    """Yield each (operation, type, mode) that simulator and twin both implement."""
    for operation in OPERATIONS:
        kinds, modes = kinds_of(operation), modes_of(operation)
        for kind, mode in itertools.product(kinds, modes):
            yield operation, kind, mode


def kinds_of(operation: str) -> tuple[str, ...]:
    if operation in ("add", "sub", "mul", "max", "min") or operation.endswith("_scalar"):
        return FLOATS if operation == "compare_scalar" else ALL
    special = {"fill": ALL, "count": ("int32", "int16"), "to_half": ("float",),
               "to_float": ("half", "int32", "int16")}  # fmt: skip
    return special.get(operation, FLOATS)


def modes_of(operation: str):
    return {"to_half": NEAREST, "to_float": NEAREST, "to_integer": ROUNDINGS,
            "compare_scalar": COMPARISONS, "keep": PATTERNS}.get(operation, (0,))  # fmt: skip


class Case:
    """A launch: random operands, and how many of their rows and columns are valid."""

    def __init__(self, operation: str, kind: str, mode: int, seed: int):
        place = OPERATIONS.index(operation), ALL.index(kind), mode, seed
        self.draw = np.random.default_rng(place)
        self.operation, self.kind, self.mode = operation, kind, mode
        self.rows, self.columns = (int(self.draw.integers(1, n + 1)) for n in (ROWS, COLUMNS))
        if operation in ("select", "gather_blocks"):
            self.columns = -(-self.columns // 16) * 16
        self.scalar = float(self.draw.integers(-4, 5))
        self.a = self.numbers()
        self.b = self.operand()

    def numbers(self) -> np.ndarray:
        """Return a random operand, `[ROWS, COLUMNS]`: mostly small integers, with exact sums."""
        shape, kind = (ROWS, COLUMNS), KINDS[self.kind]
        if self.operation in ("log", "sqrt"):
            return self.draw.uniform(0.01, 50, shape).astype(kind)
        if self.operation == "to_float" and self.kind == "int32":
            return self.draw.integers(-(1 << 31), 1 << 31, shape).astype(kind)
        if self.operation in ("exp", "div", "mul", "to_half") and self.kind in FLOATS:
            return self.draw.normal(0, 2, shape).astype(kind)
        if self.operation == "to_integer":
            return (self.draw.integers(-400, 400, shape) / 4).astype(kind)
        return self.draw.integers(-8, 9, shape).astype(kind)

    def operand(self) -> np.ndarray:
        shape, size = (ROWS, COLUMNS), np.dtype(KINDS[self.kind]).itemsize
        if self.operation == "select":
            return self.draw.integers(0, 256, 4 * ROWS * COLUMNS).astype(np.uint8)
        if self.operation == "gather":
            return self.draw.integers(0, ROWS * COLUMNS, shape).astype(np.int32)
        if self.operation == "gather_blocks":
            return 32 * self.draw.integers(0, ROWS * COLUMNS * size // 32, shape).astype(np.uint32)
        return self.numbers()

    def given(self) -> bytes:
        numbers = OPERATIONS.index(self.operation), ALL.index(self.kind), self.rows, self.columns
        return struct.pack("<5if", *numbers, self.mode, self.scalar)

    def result_type(self):
        made = {"to_half": np.float16, "to_float": np.float32, "to_integer": np.int32,
                "compare_scalar": np.uint8}  # fmt: skip
        return made.get(self.operation, KINDS[self.kind])

    def valid(self, out: np.ndarray) -> np.ndarray:
        """Return the part of the written memory that belongs to the result."""
        kind, width = self.result_type(), COLUMNS
        rows, columns = self.rows, self.columns
        if self.operation.startswith("row_") and self.operation != "row_expand":
            width, columns = 16, 1
        elif self.operation.startswith("column_") and self.operation != "column_expand":
            rows = 1
        elif self.operation == "count":
            rows = 1
        elif self.operation == "compare_scalar":
            columns = COLUMNS // 8
        elif self.operation == "keep":
            rows, columns = 1, COLUMNS // (2 if self.mode < 3 else 4 if self.mode < 7 else 1)
        elif self.operation == "transpose":
            rows, width, columns = COLUMNS, ROWS, ROWS
        count = rows * width
        return out.view(kind)[:count].reshape(rows, width)[:, :columns]

    def same(self, one: np.ndarray, other: np.ndarray) -> bool:
        if self.operation in ("exp", "log", "sqrt"):
            limit = 4 * np.finfo(one.dtype).eps
            return bool(np.allclose(one, other, rtol=float(limit), atol=float(limit)))
        if self.operation == "select":  # b holds random bits, and so NaN, too
            return one.tobytes() == other.tobytes()
        return bool(np.array_equal(one, other))


def aligned(count: int) -> np.ndarray:
    """Return memory aligned to 512 bytes, as an NPU's allocator aligns it."""
    memory = np.full(count + 512, 0x7F, np.uint8)
    start = -memory.ctypes.data % 512
    return memory[start : start + count]


class Pair:
    """pto_tiles.cpp built with PTO-ISA's simulator, and with csrc/twin (instructions on a CPU)."""

    def __init__(self, root: pathlib.Path, folder: pathlib.Path):
        path = folder / "simulator.so"
        subprocess.run(
            [*build.compiler(), "-std=c++20", "-O1", "-w", "-D__CPU_SIM", f"-I{root / 'include'}",
             "-shared", "-fPIC", SOURCE, "-o", path], check=True,
        )  # fmt: skip
        self._simulator = ctypes.CDLL(str(path)).tiles
        self._twin = twins.compile(SOURCE, [root / "include"])

    def simulator(self, case: Case) -> np.ndarray:
        class Given(ctypes.Structure):
            _fields_ = [(n, ctypes.c_int32) for n in "okrcm"] + [("scalar", ctypes.c_float)]

        a, b, out = self._memory(case)
        pointers = (ctypes.c_void_p(x.ctypes.data) for x in (a, b, out))
        self._simulator(*pointers, Given.from_buffer_copy(case.given()))
        return out

    def twin(self, case: Case) -> tuple[np.ndarray, list]:
        a, b, out = self._memory(case)
        tensors = {n: (x.ctypes.data, x.nbytes) for n, x in zip("abo", (a, b, out), strict=True)}
        block = struct.pack("<3Q", *(address for address, _ in tensors.values())) + case.given()
        found = self._twin.launch("tiles", 1, block, tensors, goes_on=True)
        return out, [f for f in found if f.severity == "error"]

    @staticmethod
    def _memory(case: Case) -> list[np.ndarray]:
        made = [aligned(8 * ROWS * COLUMNS) for _ in range(3)]
        for memory, values in zip(made, (case.a, case.b), strict=False):
            memory[: values.nbytes] = values.view(np.uint8).ravel()
        return made


def judge(pair: Pair, operation: str, kind: str, mode: int) -> str | None:
    """Return a description of the first difference, or None if there is none."""
    for seed in range(TRIES):
        case = Case(operation, kind, mode, seed)
        expected = case.valid(pair.simulator(case))
        out, findings = pair.twin(case)
        if findings:
            return f"{case.rows} x {case.columns}: {findings[0]}"
        actual = case.valid(out)
        if not case.same(actual, expected):
            row, column = (int(i[0]) for i in np.nonzero(actual != expected))
            return (
                f"{case.rows} x {case.columns}, at {row}, {column}: the twin has "
                f"{actual[row, column]}, the simulator {expected[row, column]}"
            )
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pto_isa", type=pathlib.Path)
    root, same, different = parser.parse_args().pto_isa, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(root.resolve(), pathlib.Path(folder))
        for operation, kind, mode in cases():
            wrong = judge(pair, operation, kind, mode)
            same, different = same + (not wrong), different + bool(wrong)
            if wrong:
                print(f"DIFFERS  {operation}.{kind}, mode {mode}: {wrong}")
    print(f"{same} are the same, in {TRIES} shapes each; {different} are not")
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
