"""Triton kernels that do the work of the measured kernels in measured.csv.

For CANN's operators, whose code is unknown, they assume one program per core that loops over tiles.
Those named `one_*` have one program per tile, as fla's and Liger's kernels for Ascend do.
"""

import triton
import triton.language as tl


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    for tile in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        i = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)


@triton.jit
def mul(x, y, out, n, BLOCK: tl.constexpr):
    for tile in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        i = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + i, tl.load(x + i, mask=i < n) * tl.load(y + i, mask=i < n), mask=i < n)


@triton.jit
def cast(x, out, n, BLOCK: tl.constexpr):
    for tile in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        i = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + i, tl.load(x + i, mask=i < n).to(out.dtype.element_ty), mask=i < n)


@triton.jit
def add_row(x, w, out, rows, D: tl.constexpr, R: tl.constexpr, BD: tl.constexpr):
    column = tl.arange(0, BD)
    weight = tl.load(w + column, mask=column < D)
    for tile in range(tl.program_id(0), tl.cdiv(rows, R), tl.num_programs(0)):
        row = tile * R + tl.arange(0, R)
        mask = (row < rows)[:, None] & (column < D)[None, :]
        at = row[:, None] * D + column[None, :]
        tl.store(out + at, tl.load(x + at, mask=mask) + weight[None, :], mask=mask)


@triton.jit
def rms_norm(x, w, out, rstd, rows, eps, D: tl.constexpr, R: tl.constexpr, BD: tl.constexpr):
    column = tl.arange(0, BD)
    weight = tl.load(w + column, mask=column < D, other=0.0).to(tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, R), tl.num_programs(0)):
        row = tile * R + tl.arange(0, R)
        mask = (row < rows)[:, None] & (column < D)[None, :]
        at = row[:, None] * D + column[None, :]
        a = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(a * a, 1) / D + eps)
        tl.store(rstd + row, scale, mask=row < rows)
        b = a * scale[:, None] * weight[None, :]
        tl.store(out + at, b.to(out.dtype.element_ty), mask=mask)


@triton.jit
def add_rms_norm(
    x, y, w, out, rstd, total, rows, eps, D: tl.constexpr, R: tl.constexpr, BD: tl.constexpr
):
    column = tl.arange(0, BD)
    weight = tl.load(w + column, mask=column < D, other=0.0).to(tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, R), tl.num_programs(0)):
        row = tile * R + tl.arange(0, R)
        mask = (row < rows)[:, None] & (column < D)[None, :]
        at = row[:, None] * D + column[None, :]
        a = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        a += tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(total + at, a.to(total.dtype.element_ty), mask=mask)
        scale = 1.0 / tl.sqrt(tl.sum(a * a, 1) / D + eps)
        tl.store(rstd + row, scale, mask=row < rows)
        b = a * scale[:, None] * weight[None, :]
        tl.store(out + at, b.to(out.dtype.element_ty), mask=mask)


@triton.jit
def swiglu(x, out, rows, H: tl.constexpr, R: tl.constexpr, BD: tl.constexpr):
    column = tl.arange(0, BD)
    for tile in range(tl.program_id(0), tl.cdiv(rows, R), tl.num_programs(0)):
        row = tile * R + tl.arange(0, R)
        mask = (row < rows)[:, None] & (column < H)[None, :]
        at = row[:, None] * (2 * H) + column[None, :]
        a = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(x + at + H, mask=mask, other=0.0).to(tl.float32)
        c = (a / (1.0 + tl.exp(-a)) * b).to(out.dtype.element_ty)
        tl.store(out + row[:, None] * H + column[None, :], c, mask=mask)


@triton.jit
def layer_norm(
    x, w, b, out, mean, rstd, rows, eps, D: tl.constexpr, R: tl.constexpr, BD: tl.constexpr
):
    column = tl.arange(0, BD)
    weight = tl.load(w + column, mask=column < D, other=0.0).to(tl.float32)
    bias = tl.load(b + column, mask=column < D, other=0.0).to(tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, R), tl.num_programs(0)):
        row = tile * R + tl.arange(0, R)
        mask = (row < rows)[:, None] & (column < D)[None, :]
        at = row[:, None] * D + column[None, :]
        a = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        middle = tl.sum(a, 1) / D
        d = tl.where(mask, a - middle[:, None], 0.0)
        scale = 1.0 / tl.sqrt(tl.sum(d * d, 1) / D + eps)
        tl.store(mean + row, middle, mask=row < rows)
        tl.store(rstd + row, scale, mask=row < rows)
        c = d * scale[:, None] * weight[None, :] + bias[None, :]
        tl.store(out + at, c.to(out.dtype.element_ty), mask=mask)


@triton.jit
def one_sigmoid(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(y + i, tl.sigmoid(a).to(y.dtype.element_ty), mask=i < n)


@triton.jit
def one_swish(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(y + i, (a * tl.sigmoid(a)).to(y.dtype.element_ty), mask=i < n)


@triton.jit
def one_logsigmoid(x, y, temperature, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i, mask=i < n, other=0.0).to(tl.float32)
    b = (tl.minimum(0.0, a) - tl.log(1.0 + tl.exp(-tl.abs(a)))) / temperature
    tl.store(y + i, b.to(y.dtype.element_ty), mask=i < n)


@triton.jit
def one_swiglu(x, y, z, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i, mask=i < n, other=0.0).to(tl.float32)
    b = tl.load(y + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(z + i, (a * tl.sigmoid(a) * b).to(z.dtype.element_ty), mask=i < n)


@triton.jit
def one_l2norm(x, y, rstd, eps, D, BD: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BD)
    a = tl.load(x + row * D + column, mask=column < D, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(a * a) + eps)
    tl.store(y + row * D + column, a * scale, mask=column < D)
    tl.store(rstd + row, scale)


@triton.jit
def one_rope_of_pairs(
    q, k, table, stride_q, stride_k, stride_table,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Rotate in place: pairs are adjacent, and both halves of the pairs are stored separately."""
    token, column, half = tl.program_id(0).to(tl.int64), tl.arange(0, D), tl.arange(0, D // 2)
    angles = tl.load(table + token * stride_table + column).reshape(D // 2, 2)
    cos, sin = tl.split(angles)
    for first in range(0, HQ, BQ):
        head = first + tl.arange(0, BQ)
        at = q + token * stride_q + head[:, None] * D
        mask = (head < HQ)[:, None]
        real, imaginary = tl.split(
            tl.load(at + column[None, :], mask=mask, other=0.0).reshape(BQ, D // 2, 2)
        )
        tl.store(at + half[None, :] * 2, real * cos - imaginary * sin, mask=mask)
        tl.store(at + half[None, :] * 2 + 1, real * sin + imaginary * cos, mask=mask)
    for first in range(0, HK, BK):
        head = first + tl.arange(0, BK)
        at = k + token * stride_k + head[:, None] * D
        mask = (head < HK)[:, None]
        real, imaginary = tl.split(
            tl.load(at + column[None, :], mask=mask, other=0.0).reshape(BK, D // 2, 2)
        )
        tl.store(at + half[None, :] * 2, real * cos - imaginary * sin, mask=mask)
        tl.store(at + half[None, :] * 2 + 1, real * sin + imaginary * cos, mask=mask)


@triton.jit
def matmul(
    x, w, out, M, N, K, batches,
    ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute x [batches, M, K] times w: [N, K] with ROWS, else [batches, K, N]."""
    columns = tl.cdiv(N, BN)
    tiles = tl.cdiv(M, BM) * columns
    for i in range(tl.program_id(0), tiles * batches, tl.num_programs(0)):
        batch, tile = i // tiles, i % tiles
        row = tile // columns * BM + tl.arange(0, BM)
        column = tile % columns * BN + tl.arange(0, BN)
        total = tl.zeros((BM, BN), tl.float32)
        for first in range(0, K, BK):
            k = first + tl.arange(0, BK)
            at = x + batch * M * K + row[:, None] * K + k[None, :]
            a = tl.load(at, mask=(row < M)[:, None] & (k < K)[None, :], other=0.0)
            if ROWS:
                mask = (column < N)[:, None] & (k < K)[None, :]
                b = tl.trans(tl.load(w + column[:, None] * K + k[None, :], mask=mask, other=0.0))
            else:
                mask = (k < K)[:, None] & (column < N)[None, :]
                at = w + batch * N * K + k[:, None] * N + column[None, :]
                b = tl.load(at, mask=mask, other=0.0)
            total = tl.dot(a, b, total)
        at = out + batch * M * N + row[:, None] * N + column[None, :]
        mask = (row < M)[:, None] & (column < N)[None, :]
        tl.store(at, total.to(out.dtype.element_ty), mask=mask)
