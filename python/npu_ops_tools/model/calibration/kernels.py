"""Triton kernels whose time is mostly one cost."""

import triton
import triton.language as tl


@triton.jit
def blocks(out, BLOCK: tl.constexpr):
    """Start programs: each writes one tile."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.zeros((BLOCK,), tl.float32))


@triton.jit
def copy(x, out, n, BLOCK: tl.constexpr):
    """Copy contiguous tiles."""
    for tile in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        i = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def bursts(x, out, rows, stride, R: tl.constexpr, W: tl.constexpr):
    """Copy tiles of rows with W elements; rows are `stride` elements apart."""
    for tile in range(tl.program_id(0), tl.cdiv(rows, R), tl.num_programs(0)):
        row = tile * R + tl.arange(0, R)
        at = row[:, None] * stride + tl.arange(0, W)[None, :]
        mask = (row < rows)[:, None]
        tl.store(out + at, tl.load(x + at, mask=mask), mask=mask)


@triton.jit
def add(x, out, times, BLOCK: tl.constexpr):
    """Add to one tile many times; each addition is BLOCK / 64 repeats of a vector instruction."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i)
    total = a
    for _ in range(0, times):
        total = total + a
    tl.store(out + i, total)


@triton.jit
def matmul(a, b, out, tiles, K, M: tl.constexpr, N: tl.constexpr, BK: tl.constexpr):
    """Compute `tiles` products [M, K] x [K, N]. For small K, the store from the cube core
    dominates."""
    row, column, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BK)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        total = tl.zeros((M, N), tl.float32)
        for k in range(0, K, BK):
            left = tl.load(a + (tile * M + row[:, None]) * K + k + inner[None, :])
            right = tl.load(b + (k + inner[:, None]) * N + column[None, :])
            total += tl.dot(left, right)
        at = (tile * M + row[:, None]) * N + column[None, :]
        tl.store(out + at, total.to(out.dtype.element_ty))
