"""Random inputs for kernels of fbgemm-ascend and MindIE-SD, with their expected results.

Each function returns a Run of the kernel with its name. Tilings are as the packages' host code
fills them; results come from numpy.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping

import numpy as np
from npu_ops_emulator import twins
from upstream_ascendc import aligned, bf16, numbers

POISON = 0x7F
WORKSPACE = 32 * 1024 * 1024  # bytes, including the part that the system reserves


@dataclasses.dataclass
class Run:
    """A launch of a kernel on random inputs.

    arguments: by the kernel's parameter names; a missing one is null.
    expected: contents of arguments afterwards, to `tolerance` times the largest number. An argument
      that is only in `expected` is an output; all its bytes are POISON first.
    """

    tiling: Mapping[str, object]
    arguments: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]
    blocks: int
    key: int = 0
    tolerance: float = 0.0

    def judge(self, source) -> list[str]:
        """Run the kernel of an upstream_bisheng.Source; return a sentence for each error."""
        twin = twins.compile(source.write_unit(), source.folders)
        tiling = np.frombuffer(self._packed(source), np.uint8)
        arrays = {name: aligned(array) for name, array in self.arguments.items()}
        arrays |= {
            name: aligned(np.full(array.nbytes, POISON, np.uint8)).view(array.dtype)
            for name, array in self.expected.items()
            if name not in arrays
        }
        arrays |= {source.parameters[-2]: aligned(np.zeros(WORKSPACE, np.uint8)),
                   source.parameters[-1]: aligned(tiling)}  # fmt: skip
        unknown = set(arrays) - set(source.parameters)
        assert not unknown, unknown
        given = [arrays.get(name) for name in source.parameters]
        block = struct.pack(f"<{len(given)}Q", *(0 if a is None else a.ctypes.data for a in given))
        tensors = {name: (a.ctypes.data, a.nbytes) for name, a in arrays.items()}
        findings = twin.launch("run", self.blocks, block, tensors, goes_on=True)
        wrong = [str(finding) for finding in findings if finding.severity == "error"]
        return wrong + [
            f"{name}: another result"
            for name, right in self.expected.items()
            if not _close(arrays[name].reshape(right.shape), right, self.tolerance)
        ]

    def _packed(self, source) -> bytes:
        missing = set(source.fields) - set(self.tiling)
        assert not missing, f"the tiling lacks {sorted(missing)}"
        packed = struct.pack("<Q", self.key)
        for name, array in source.fields.items():
            values = list(self.tiling[name]) if array else [self.tiling[name]]
            values += [0] * (64 * array - len(values))
            for value in values:
                packed += struct.pack("<f4x" if isinstance(value, float) else "<q", value)
        return packed


def _close(got: np.ndarray, right: np.ndarray, tolerance: float) -> bool:
    """Return whether the arrays agree; without a tolerance, bit for bit. uint16 holds bf16."""
    if not tolerance:
        return got.tobytes() == right.tobytes()
    got, right = (
        numbers(x) if x.dtype == np.uint16 else x.astype(np.float64) for x in (got, right)
    )
    return bool((np.abs(got - right) <= tolerance * np.abs(right).max()).all())


def _split(total: int, blocks: int) -> dict[str, int]:
    """Divide work as the packages' host code does: equally, with one more for the first cores."""
    return {"baseBatchLen": total // blocks, "tailSplitIndex": total % blocks}


def _offsets(lengths: np.ndarray, dtype) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(dtype)


def offsets_range(draw: np.random.Generator) -> Run:
    lengths = draw.integers(0, 200, 17)
    lengths[[0, 5]] = 0
    offsets = _offsets(lengths, np.int32)
    result = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)
    tiling = {"offsetsLen": 17, "totalRows": 17, "rangeSize": len(result), "lutSize": 64}
    return Run(tiling, {"offsets": offsets[:-1]}, {"result": result}, 3)


def asynchronous_complete_cumsum(draw: np.random.Generator) -> Run:
    """Uses one block, because the twin cannot run blocks that wait for each other."""
    x = draw.integers(-1000, 1000, 253).astype(np.int32)
    tiling = {"totalLength": 253, "totalBlocks": 1, "blocksPerCore": 1, "remainderBlocks": 0}
    return Run(tiling, {"x": x}, {"y": _offsets(x, np.int32)}, 1)


def dense_to_jagged(draw: np.random.Generator) -> Run:
    batch, rows, width, blocks = 7, 9, 24, 3
    lengths = draw.integers(0, rows, batch)
    dense = bf16(draw.standard_normal((batch, rows, width)))
    jagged = np.concatenate([dense[i, :n] for i, n in enumerate(lengths)])
    tiling = {
        "denseDim1": rows, "denseDim2": width, "left": batch % blocks,
        "singleCoreBatch": batch // blocks, "singleLoopSize": 512,
        "denseTotal": dense.size, "jaggedTotal": jagged.size,
    }  # fmt: skip
    arguments = {"dense": dense, "offset": _offsets(lengths, np.int32)}
    return Run(tiling, arguments, {"jagged_dense": jagged}, blocks)


def jagged_to_padded_dense(draw: np.random.Generator) -> Run:
    batch, longest, width, blocks = 7, 9, 12, 3
    lengths = draw.integers(0, longest + 3, batch)
    values = draw.integers(-(2**40), 2**40, (lengths.sum(), width))
    out = np.full((batch, longest, width), -5, np.int64)
    offsets = _offsets(lengths, np.int64)
    for i, n in enumerate(np.minimum(lengths, longest)):
        out[i, :n] = values[offsets[i] :][:n]
    tiling = {
        "totalBatch": batch, **_split(batch, blocks), "valuesDim0": len(values),
        "valuesDim1": width, "offsetDim0": batch + 1, "outDim1": longest,
        "ubCanUsed": 64 * 1024, "paddingValueFp32": -5.0, "paddingValueInt64": -5,
    }  # fmt: skip
    return Run(tiling, {"values": values, "offsets": offsets}, {"out": out}, blocks)


def permute_pooled_embs(draw: np.random.Generator) -> Run:
    widths, batch, blocks = np.array([16, 8, 24, 40]), 11, 3
    order = draw.permutation(4)
    x = bf16(draw.standard_normal((batch, widths.sum())))
    begins = _offsets(widths, np.int64)
    parts = [x[:, begins[i] : begins[i + 1]] for i in order]
    tiling = {
        "batchSize": batch, "totalFeatureNum": 4, "totalDim": x.shape[1],
        **_split(x.shape[1], blocks), "ubCanUsed": 64 * 1024,
    }  # fmt: skip
    arguments = {
        "pooled_embs": x, "offset_dim_list": begins, "permute_list": order,
        "inv_offset_dim_list": _offsets(widths[order], np.int64),
    }  # fmt: skip
    return Run(tiling, arguments, {"output": np.concatenate(parts, 1)}, blocks)


def permute2d_sparse_data(draw: np.random.Generator) -> Run:
    """Puts rows of lengths in another order, together with their values and weights."""
    features, batch, blocks = 5, 6, 2
    lengths = draw.integers(0, 9, (features, batch)).astype(np.int32)
    order = draw.permutation(features).astype(np.int32)
    begins = _offsets(lengths.sum(1), np.int64)
    values = draw.standard_normal(begins[-1]).astype(np.float16)
    weights = draw.standard_normal(begins[-1]).astype(np.float32)

    def permuted(x: np.ndarray) -> np.ndarray:
        return np.concatenate([x[begins[i] : begins[i + 1]] for i in order])

    tiling = {
        "coreNum": blocks, "permuteDim0": features, "lengthsT": features, "lengthsB": batch,
        "valuesDim": begins[-1], "valuesOutDim": begins[-1], "weightsColumns": 1,
        "totalBatch": features, **_split(features, blocks), "ubCanUsed": 64 * 1024,
        "enableWeights": 1, "enableTotalOffset": 1,
    }  # fmt: skip
    arguments = {"permute": order, "lengths": lengths, "values": values, "weights": weights,
                 "totalOffset": begins}  # fmt: skip
    expected = {"outLengths": lengths[order], "outValues": permuted(values),
                "outWeights": permuted(weights)}  # fmt: skip
    return Run(tiling, arguments, expected, blocks, key=1)


def segment_sum_csr(draw: np.random.Generator) -> Run:
    segments, blocks = 13, 3
    lengths = draw.integers(1, 300, segments)
    values = draw.standard_normal(lengths.sum()).astype(np.float32)
    begins = _offsets(lengths, np.int32)
    sums = np.add.reduceat(values.astype(np.float64), begins[:-1])
    tiling = {
        "segmentNums": segments, "csrSegLength": segments + 1, "totalLength": values.size,
        "baseCoreSegments": segments // blocks, "remainedSegments": segments % blocks,
        "formerCoreSegments": segments // blocks + 1, "batchSize": 1, "maxSegmentLen": 320,
    }  # fmt: skip
    return Run(tiling, {"csrSeg": begins, "values": values}, {"y": sums.astype(np.float32)}, blocks,
               tolerance=1e-6)  # fmt: skip


def _lookups(draw: np.random.Generator) -> tuple[dict, np.ndarray, np.ndarray, np.ndarray, int]:
    """Draw lookups: two tables of 40 rows, with 48 indices into each, on two cores.

    Returns:
        The tiling, starts of tables, indices, starts of bags, rows of a table.
    """
    width, blocks, batch, rows = 24, 2, 4, 40
    indices = draw.integers(0, rows, 96).astype(np.int32)
    offsets = np.arange(0, 97, 12).astype(np.int32)
    tiling = {
        "formerCoreNum": blocks, "formerCoreLength": 48, "formerTileNum": 3,
        "formerTileLength": 16, "formerLastTileLength": 16, "tailCoreNum": 0, "tailCoreLength": 0,
        "tailTileNum": 0, "tailTileLength": 0, "tailLastTileLength": 0, "weightsOffsetsLength": 2,
        "batchSize": batch, "embedDimLength": width, "indicesAllLength": 96,
        "devWeightsLength": 2 * rows, "alignedEmbedDimLength": width,
    }  # fmt: skip
    # padded, as the kernel reads whole blocks
    begins = np.array([0, rows * width, 0, 0, 0, 0, 0, 0], np.int32)
    return tiling, begins, indices, np.pad(offsets, (0, 7)), rows


def dense_embedding_codegen_lookup_function(draw: np.random.Generator) -> Run:
    tiling, begins, indices, offsets, rows = _lookups(draw)
    weights = draw.standard_normal((2 * rows, tiling["embedDimLength"])).astype(np.float32)
    found = weights[indices + np.repeat([0, rows], 48)]
    arguments = {"dev_weights": weights, "weights_offsets": begins, "indices": indices,
                 "offsets": offsets}  # fmt: skip
    return Run(tiling, arguments, {"out": found}, 2)


def dense_embedding_codegen_lookup_function_grad(draw: np.random.Generator) -> Run:
    """The kernel adds to `out`. Cores add atomically, in any order."""
    tiling, begins, indices, offsets, rows = _lookups(draw)
    grad = draw.standard_normal((96, tiling["embedDimLength"])).astype(np.float32)
    sums = np.zeros((2 * rows, tiling["embedDimLength"]))
    np.add.at(sums, indices + np.repeat([0, rows], 48), grad)
    arguments = {"weights_grad": grad, "weights_offsets": begins, "indices": indices,
                 "offsets": offsets, "out": np.zeros_like(sums, np.float32)}  # fmt: skip
    return Run(tiling, arguments, {"out": sums.astype(np.float32)}, 2, tolerance=1e-6)


def split_embedding_codegen_forward_unweighted(draw: np.random.Generator) -> Run:
    """Sums the bags of two tables, four bags per table; each of four cores has two bags."""
    tables, batch, width, rows, blocks = 2, 4, 24, 30, 4
    lengths = draw.integers(1, 9, tables * batch)
    offsets = _offsets(lengths, np.int64)
    indices = draw.integers(0, rows, offsets[-1])
    weights = draw.standard_normal((tables * rows, width)).astype(np.float32)
    out = np.zeros((batch, tables * width))
    for table in range(tables):
        for i in range(batch):
            bag = table * batch + i
            found = weights[indices[offsets[bag] : offsets[bag + 1]] + table * rows]
            out[i, table * width : (table + 1) * width] = found.sum(0, dtype=np.float64)
    tiling = {
        "devWeightsDim0": weights.size, "weightsOffsetsDim0": tables, "dOffsetsDim0": tables + 1,
        "indicesDim0": indices.size, "offsetsDim0": tables * batch + 1, "outDim0": batch,
        "outDim1": tables * width, "maxD": width, "enableHash": 0, "enableRowsPerTable": 0,
        "splitBaseLen": 2, "tailSplitIndex": 0, "ubCanUsed": 64 * 1024, "poolMode": 0,
    }  # fmt: skip
    arguments = {
        "devWeights": weights, "weightsOffsets": np.array([0, rows * width]),
        "dOffsets": np.array([0, width, 2 * width], np.int32), "indices": indices,
        "offsets": offsets, "indiceSizeCumsum": offsets[::batch],
        "out": np.zeros_like(out, np.float32),
    }  # fmt: skip
    return Run(tiling, arguments, {"out": out.astype(np.float32)}, blocks, tolerance=1e-6)


def mul_add(draw: np.random.Generator) -> Run:
    """a + b * c, where c has one row for all tokens of a sequence."""
    batch, tokens, width, blocks = 2, 11, 96, 3
    a, b = (bf16(draw.standard_normal((batch, tokens, width))) for _ in range(2))
    c = bf16(draw.standard_normal((batch, 1, width)))
    each = -(-tokens // blocks)
    tiling = {
        "batchSize": batch, "seqLen": tokens, "hiddenSize": width, "hiddenSizeAlign": width,
        "rowsPerTile": 3, "formerNum": blocks - 1, "formerLength": each * width,
        "tailLength": (tokens - each * (blocks - 1)) * width, "dtypeFlag": 0,
    }  # fmt: skip
    out = bf16(numbers(a) + numbers(b) * numbers(c))
    return Run(tiling, {"a": a, "b": b, "c": c}, {"out": out}, blocks, tolerance=2**-8)


def la_preprocess(draw: np.random.Generator) -> Run:
    """Converts [B, S, N, D] in bf16 to [B, N, S, D] in half; zeros pad S to a multiple of 16."""
    batch, heads, dim, lengths, blocks = 2, 3, 128, (21, 13, 16), 4
    arguments, expected = {}, {}
    for name, tokens in zip(("query", "key", "value"), lengths, strict=True):
        x = bf16(draw.standard_normal((batch, tokens, heads, dim)))
        arguments[name] = x
        padded = np.zeros((batch, heads, -(-tokens // 16) * 16, dim), np.float16)
        padded[:, :, :tokens] = numbers(x).astype(np.float16).transpose(0, 2, 1, 3)
        expected[f"out_{name}"] = padded
    tiling = {
        "batchSize": batch, "headNum": heads, "qSeqLen": lengths[0], "kSeqLen": lengths[1],
        "vSeqLen": lengths[2], "alignLen": 16, "ubSize": 16 * 1024,
    }  # fmt: skip
    return Run(tiling, arguments, expected, blocks)


def norm_rope_concat(draw: np.random.Generator) -> Run:
    """RMSNorm with a weight, then rotation by halves; the encoder's tokens follow the others."""
    batch, heads, dim, blocks = 2, 3, 128, 3
    tokens, more, eps = 7, 4, 1e-6
    total = tokens + more
    angle = np.tile(draw.uniform(-4, 4, (total, dim // 2)), 2)
    sin, cos = np.float16(np.sin(angle)), np.float16(np.cos(angle))
    arguments = {"rope_sin": sin, "rope_cos": cos}
    expected = {}

    def tensor(*shape: int) -> np.ndarray:
        return draw.standard_normal(shape).astype(np.float16)

    def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight

    for name in ("query", "key"):
        own, other = tensor(batch, tokens, heads, dim), tensor(batch, more, heads, dim)
        weight, added = tensor(dim), tensor(dim)
        x = np.concatenate([normed(own, weight), normed(other, added)], 1)
        swapped = np.concatenate([-x[..., dim // 2 :], x[..., : dim // 2]], -1)
        turned = x * cos[:, None] + swapped * sin[:, None]
        expected[f"{name}_output"] = turned.transpose(0, 2, 1, 3).astype(np.float16)
        arguments |= {name: own, f"encoder_{name}": other, f"norm_{name}_weight": weight,
                      f"norm_added_{name}_weight": added}  # fmt: skip
    own, other = tensor(batch, tokens, heads, dim), tensor(batch, more, heads, dim)
    arguments |= {"value": own, "encoder_value": other}
    expected["value_output"] = np.concatenate([own, other], 1).transpose(0, 2, 1, 3).copy()
    tiling = {
        "batch": batch, "headNum": heads, "headDim": dim, "usedCore": blocks, "splitHeadNum": 2,
        "avgHeads": 2, "tailHeads": 1, "normDim": dim, "ropeDim": dim, "ropeActualSeq": total,
        "eps": eps, "scale": 1 / dim,
    }  # fmt: skip
    for part in ("Query", "Key", "Value"):
        low = part.lower()
        tiling |= {f"{low}Seq": tokens, f"encoder{part}Seq": more, f"total{part}Seq": total}
    return Run(tiling, arguments, expected, blocks, tolerance=2**-10)


RUNS = {
    run.__name__: run
    for run in (
        offsets_range, asynchronous_complete_cumsum, dense_to_jagged, jagged_to_padded_dense,
        permute_pooled_embs, permute2d_sparse_data, segment_sum_csr,
        dense_embedding_codegen_lookup_function, dense_embedding_codegen_lookup_function_grad,
        split_embedding_codegen_forward_unweighted, mul_add, la_preprocess, norm_rope_concat,
    )
}  # fmt: skip
# Known findings of the twin (npu_ops_emulator.twins): kernel -> {part of the finding: reason}.
UNUSED = "converts whole buffers, of which it uses what was loaded"
KNOWN = {
    "la_preprocess": {
        "uninitialised": UNUSED,
        "copy_ubuf_to_gm_align_b16 on pipe MTE3": (
            "a race: its zeros may be stored before they are written"
        ),
    },
    "norm_rope_concat": {
        "uninitialised": UNUSED,
        "Failed to check dstLocal size in Cast": "a Cast into two tensors that lie side by side",
    },
}
NOT_RUN = {"jagged_to_padded_dense_v2": "not run: it takes a list of tensors"}
