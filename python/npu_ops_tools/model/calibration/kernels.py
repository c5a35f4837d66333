"""Triton kernels of which the time is mostly that of one thing."""

import triton
import triton.language as tl


@triton.jit
def blocks(out, BLOCK: tl.constexpr):
    """Starts programs: each writes one tile."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.zeros((BLOCK,), tl.float32))


@triton.jit
def copy(x, out, n, BLOCK: tl.constexpr):
    """Moves contiguous tiles."""
    for tile in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        i = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def bursts(x, out, rows, stride, R: tl.constexpr, W: tl.constexpr):
    """Moves tiles of rows of W elements, `stride` elements from row to row."""
    for tile in range(tl.program_id(0), tl.cdiv(rows, R), tl.num_programs(0)):
        row = tile * R + tl.arange(0, R)
        at = row[:, None] * stride + tl.arange(0, W)[None, :]
        mask = (row < rows)[:, None]
        tl.store(out + at, tl.load(x + at, mask=mask), mask=mask)


@triton.jit
def add(x, out, times, BLOCK: tl.constexpr):
    """Adds to one tile, many times: BLOCK / 64 repeats of a vector instruction each."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i)
    total = a
    for _ in range(0, times):
        total = total + a
    tl.store(out + i, total)


@triton.jit
def matmul(a, b, out, tiles, K, M: tl.constexpr, N: tl.constexpr, BK: tl.constexpr):
    """`tiles` products [M, K] x [K, N]; with few K what is left is the way out of the cube core."""
    row, column, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BK)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        total = tl.zeros((M, N), tl.float32)
        for k in range(0, K, BK):
            left = tl.load(a + (tile * M + row[:, None]) * K + k + inner[None, :])
            right = tl.load(b + (k + inner[:, None]) * N + column[None, :])
            total += tl.dot(left, right)
        at = (tile * M + row[:, None]) * N + column[None, :]
        tl.store(out + at, total.to(out.dtype.element_ty))
