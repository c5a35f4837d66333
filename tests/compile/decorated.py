"""Kernels as in other libraries: `triton.autotune` and `triton.heuristics` set constants."""

import triton
import triton.language as tl

SIZES = [
    triton.Config({"BLOCK": size}, num_warps=4, multibuffer=size < 4096) for size in (512, 4096)
]


@triton.heuristics(
    {
        "SCALED": lambda args: args["scale"] is not None,
        "WHOLE": lambda args: args["n"] % 4096 == 0,
    }
)
@triton.autotune(SIZES, key=["n"])
@triton.jit
def scaled(x, scale, out, n, BLOCK: tl.constexpr, SCALED: tl.constexpr, WHOLE: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at) if WHOLE else tl.load(x + at, mask=at < n)
    if SCALED:
        value *= tl.load(scale + at, mask=at < n)
    tl.store(out + at, value, mask=at < n)


@triton.autotune(SIZES, key=["n"])
@triton.heuristics({"HALF": lambda args: args["BLOCK"] // 2})
@triton.jit
def halves(x, n, step, BLOCK: tl.constexpr, HALF: tl.constexpr, ONE: tl.constexpr = 1):
    at = tl.program_id(0) * step + tl.arange(0, HALF)
    tl.store(x + at, tl.load(x + at, mask=at < n) + ONE, mask=at < n)


@triton.autotune([triton.Config({"BLOCK": size}) for size in (512, 262144)], key=["n"])
@triton.jit
def sizes(x, n, step, BLOCK: tl.constexpr):
    at = tl.program_id(0) * step + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)


@triton.heuristics({"SIZE": lambda args: args["x"].shape[-1]})
@triton.jit
def shaped(x, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(x + at, tl.load(x + at))


@triton.jit
def planes(x, n, BLOCK: tl.constexpr):
    at = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)
