"""Chooses the kernels that stand for a measured row, and their arguments."""

from __future__ import annotations

import ast
import csv
import dataclasses
import math
import pathlib
from collections.abc import Iterator

FOLDER = pathlib.Path(__file__).parent
POINTERS = {"bf16": "*bf16", "fp32": "*fp32", "fp16": "*fp16"}
SOCS = {"910B4-1": "Ascend910B4-1", "910B4": "Ascend910B4", "910B1/A3": "Ascend910_9391"}
# Elements of a tile. The model's fastest tile is used, because the vendor has tuned its kernels.
TILES = (4096, 8192, 16384)


@dataclasses.dataclass(frozen=True)
class Measured:
    """A row of measured.csv. bytes: of all tensors; soc: its name in the model."""

    op: str
    soc: str
    shapes: tuple
    dtypes: tuple[str, ...]
    output_dtypes: tuple[str, ...]
    blocks: int
    runs: int
    time: float
    p10: float
    p90: float
    bytes: float
    source: str


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A kernel of kernels.py with the arguments of a launch."""

    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, int], ...]
    values: tuple
    grid: int


def rows() -> Iterator[Measured]:
    """Yield the measured rows for which there is a kernel."""
    with (FOLDER / "measured.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            measured = _measured(row)
            if measured is not None and candidates(measured):
                yield measured


def _measured(row: dict[str, str]) -> Measured | None:
    a3 = row["soc"].startswith("910_93")
    if not row["shapes"].startswith("["):
        return None
    return Measured(
        row["op"], "Ascend910_9391" if a3 else SOCS[row["soc"]],
        tuple(map(tuple, ast.literal_eval(row["shapes"]))), tuple(row["dtypes"].split(",")),
        tuple(row["output_dtypes"].split(",")), int(row["blocks"] or 0), int(row["runs"]),
        float(row["median_us"]), float(row["p10_us"] or row["median_us"]),
        float(row["p90_us"] or row["median_us"]), float(row["bytes"] or 0), row["source"],
    )  # fmt: skip


def candidates(row: Measured) -> list[Candidate]:
    """Return kernels of several tile sizes that do the measured work; [] if there are none.

    CANN's Cast is left out: its rows were measured beside other work (up to 16 times slower).
    """
    plans = {
        "Add": _add, "Mul": _binary, "DtypeCast": _cast, "RmsNorm": _rows_kernel,
        "AddRmsNorm": _rows_kernel, "SwiGlu": _rows_kernel, "LayerNormV3": _rows_kernel,
        "triton_sigmoid": _flat, "triton_logsigmoid": _flat, "triton_swish": _flat,
        "triton_swiglu": _flat, "triton_l2norm": _l2norm, "triton_llama4_rope_fwd": _rope,
        "MatMulV2": _matmul, "MatMulV3": _matmul, "BatchMatMulV2": _matmul,
        "GroupedMatmul": _matmul,
    }  # fmt: skip
    if row.op not in plans or row.dtypes[0] not in POINTERS:
        return []
    return plans[row.op](row)


def _power(n: float) -> int:
    """Return the power of two at or above n."""
    return 1 << (max(1, math.ceil(n)) - 1).bit_length()


def _candidate(kernel: str, signature: dict, constants: dict, values: list, grid: int) -> Candidate:
    return Candidate(
        kernel, tuple(signature.items()), tuple(constants.items()), tuple(values), grid
    )


def _elements(row: Measured) -> int:
    return math.prod(row.shapes[0])


def _blocks(row: Measured) -> list[int]:
    most = TILES[-1] // (2 if "fp32" in row.dtypes[0] else 1)
    each = max(64, min(most, _power(_elements(row) / row.blocks)))
    return [each] if each <= 2048 else [each, each // 2]


def _add(row: Measured) -> list[Candidate]:
    first, second = row.shapes[0], row.shapes[-1]
    if len(row.shapes) == 1 or first == second:
        return _binary(row)
    if second != first[-1:]:
        return []
    width = first[-1]
    tall = max(1, TILES[1] // width)
    signature = {"x": "*bf16", "w": "*bf16", "out": "*bf16", "rows": "i32"}
    constants = {"D": width, "R": tall, "BD": width}
    values = [None, None, None, _elements(row) // width]
    return [_candidate("add_row", signature, constants, values, row.blocks)]


def _binary(row: Measured) -> list[Candidate]:
    if len(row.shapes) == 2 and row.shapes[0] != row.shapes[1]:
        return []
    pointer = POINTERS[row.dtypes[0]]
    signature = {"x": pointer, "y": pointer, "out": pointer, "n": "i32"}
    values = [None, None, None, _elements(row)]
    name = row.op.lower()
    return [_candidate(name, signature, {"BLOCK": b}, values, row.blocks) for b in _blocks(row)]


def _cast(row: Measured) -> list[Candidate]:
    if row.output_dtypes[0] not in POINTERS:
        return []
    signature = {"x": POINTERS[row.dtypes[0]], "out": POINTERS[row.output_dtypes[0]], "n": "i32"}
    values = [None, None, _elements(row)]
    return [_candidate("cast", signature, {"BLOCK": b}, values, row.blocks) for b in _blocks(row)]


def _rows_kernel(row: Measured) -> list[Candidate]:
    """Return kernels that process rows: their pointers, then "rows", and "eps" if they have one."""
    pointer = POINTERS[row.dtypes[0]]
    name, pointers, width = {
        "RmsNorm": ("rms_norm", "x w out rstd", "D"),
        "AddRmsNorm": ("add_rms_norm", "x y w out rstd total", "D"),
        "SwiGlu": ("swiglu", "x out", "H"),
        "LayerNormV3": ("layer_norm", "x w b out mean rstd", "D"),
    }[row.op]
    signature = {
        each: "*fp32" if each in ("rstd", "mean") else pointer for each in pointers.split()
    }
    columns = row.shapes[0][-1] // (2 if width == "H" else 1)
    count = _elements(row) // row.shapes[0][-1]
    values = [None] * len(signature) + [count]
    signature["rows"] = "i32"
    if width == "D":
        signature["eps"] = "fp32"
        values.append(1e-6)
    most = _power(count / row.blocks)
    tall = sorted({max(1, min(most, tile // columns)) for tile in TILES})
    constants = ({width: columns, "R": r, "BD": columns} for r in tall)
    return [_candidate(name, signature, each, values, row.blocks) for each in constants]


def _flat(row: Measured) -> list[Candidate]:
    """Return an activation kernel with fla's block size, 2048 elements per program.

    Source: `compute_activation_block_size` of fla at 7dd7cf5e.
    """
    name, n = row.op.removeprefix("triton_"), _elements(row)
    pointers = ("x", "y", "z") if name == "swiglu" else ("x", "y")
    signature = dict.fromkeys(pointers, "*bf16")
    values = [None] * len(pointers)
    if name == "logsigmoid":
        signature["temperature"] = "fp32"
        values.append(1.0)
    signature["n"] = "i32"
    return [_candidate(f"one_{name}", signature, {"BLOCK": 2048}, [*values, n], -(-n // 2048))]


def _l2norm(row: Measured) -> list[Candidate]:
    count, width = row.shapes[0]
    signature = {"x": "*bf16", "y": "*bf16", "rstd": "*fp32", "eps": "fp32", "D": "i32"}
    values = [None, None, None, 1e-6, width]
    return [_candidate("one_l2norm", signature, {"BD": width}, values, count)]


def _rope(row: Measured) -> list[Candidate]:
    """Return a rope kernel with a program per token, and Liger's rule for heads per tile."""
    _, tokens, heads, width = row.shapes[0]
    fits = 1 << int(192 * 1024 * 8 * 0.9 / (20 * 16 * width)).bit_length() - 1
    block = min(_power(heads), fits)
    signature = {"q": "*bf16", "k": "*bf16", "table": "*fp32"}
    signature |= dict.fromkeys(("stride_q", "stride_k", "stride_table"), "i32")
    constants = {"HQ": heads, "HK": row.shapes[1][2], "D": width, "BQ": block, "BK": min(8, block)}
    values = [None, None, None, heads * width, row.shapes[1][2] * width, width]
    return [_candidate("one_rope_of_pairs", signature, constants, values, tokens)]


def _matmul(row: Measured) -> list[Candidate]:
    """Return kernels of a matrix product.

    Weights are [N, K] in MatMul, and [K, N] per batch or group in the other operators.

    The tokens per group were not recorded. Grouped products of more than 256 tokens are excluded,
    because they took no longer than those of fewer tokens.
    """
    transposed = int(row.op.startswith("MatMul"))
    first, weight = row.shapes[:2]
    m, k = first[-2:]
    n = weight[-2] if transposed else weight[-1]
    batches = 1 if transposed else weight[0]
    if row.op == "GroupedMatmul":
        if m > 256:
            return []
        m //= batches
    signature = dict.fromkeys(("x", "w", "out"), "*bf16")
    signature |= dict.fromkeys(("M", "N", "K", "batches"), "i32")
    values = [None, None, None, m, n, k, batches]
    return [
        _candidate(
            "matmul", signature, {"ROWS": transposed, "BM": bm, "BN": bn, "BK": bk}, values,
            min(row.blocks, batches * -(-m // bm) * -(-n // bn)),
        )
        for bm, bn, bk in _tiles(m, n)
    ]  # fmt: skip


def _tiles(m: int, n: int) -> list[tuple[int, int, int]]:
    """Return tiles small enough for double buffering on chip."""
    if m <= 64:
        return [(16, 128, 256), (16, 256, 256), (16, 64, 512)]
    return [(128, 256, 64), (128, 256, 128), (128, 128, 256), (128, 64, 256)][2 * (n <= 128) :]
