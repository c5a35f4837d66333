"""Small kernels, each with one thing that `npu-ops compile` reports."""

import triton
import triton.language as tl


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        total = tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n)
        tl.store(out + at, total, mask=at < n)


@triton.jit
def once(x, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)


@triton.jit
def matmul(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        inner = k + tl.arange(0, BK)
        left = tl.load(a + rows[:, None] * K + inner[None, :])
        right = tl.load(b + inner[:, None] * N + columns[None, :])
        total = tl.dot(left, right, total)
    tl.store(c + rows[:, None] * N + columns[None, :], tl.exp(total))


@triton.jit
def random(x, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, tl.rand(n, at), mask=at < n)


@triton.jit
def between(x, out, BLOCK: tl.constexpr):
    """Add 1 to elements 1 to 4. The mask compares the index with constants on both sides."""
    at = tl.arange(0, BLOCK)
    mask = (at > 0) & (at < 5)
    tl.store(out + at, tl.load(x + at, mask=mask, other=0.0) + 1, mask=mask)
