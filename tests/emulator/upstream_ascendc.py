"""Runs other projects' AscendC kernels, unmodified, on the twin, and compares them with numpy.

python tests/emulator/upstream_ascendc.py --sgl SGL_KERNEL_NPU --vllm VLLM_ASCEND

Each argument is a checkout of upstream's repository; none of its files is changed or copied. The
twin (csrc/twin) runs AscendC instructions on the CPU. These kernels were not written for the twin,
so they test its instructions more than ours do. The script prints each kernel's error against the
formula in fp64 on the same rounded inputs, and the twin's findings. The exit status is 1 if a
result is wrong, or if a finding is not in KNOWN.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator

import numpy as np
from npu_ops_emulator import EmulatorError, twins

TOLERANCE = 5e-3  # relative RMS: bf16 keeps 8 bits
# Findings of the twin in upstream's kernels, with the reason for each.
KNOWN = {
    ("sgl causal_conv1d_update", "race"): (
        "the next token's x may be loaded while the vector unit still reads this one's"
    ),
    ("sgl recurrent_gated_delta_rule", "vendor-check"): (
        "AscendC's Sigmoid takes no target that is its source, says its own check"
    ),
}
NAN = 0x7FFF


def bf16(numbers: np.ndarray) -> np.ndarray:
    """Round numbers to bf16; return the bits as uint16."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def numbers(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def aligned(array: np.ndarray | None) -> np.ndarray | None:
    """Return an aligned copy, as an NPU allocates: the twin finds races by blocks of 32 bytes."""
    if array is None:
        return None
    memory = np.empty(array.nbytes + 512, np.uint8)
    start = -memory.ctypes.data % 512
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@dataclasses.dataclass
class Run:
    """A launch of one of upstream's kernels.

    source: C++ that includes upstream's source and defines the kernel `run`.
    arguments: in order; None is a null pointer.
    blocks: number of cores.
    expected: contents of arguments afterwards, by name.
    """

    name: str
    folder: pathlib.Path
    source: str
    arguments: dict[str, np.ndarray | None]
    scalars: bytes
    blocks: int
    expected: dict[str, np.ndarray]

    def __post_init__(self):
        self.arguments = {name: aligned(array) for name, array in self.arguments.items()}

    def judge(self) -> bool:
        """Run the kernel and print a line; return whether results and findings are as expected."""
        with tempfile.TemporaryDirectory() as scratch:
            path = pathlib.Path(scratch) / "run.cpp"
            path.write_text(self.source)
            twin = twins.compile(path, [self.folder])
        given = {name: a for name, a in self.arguments.items() if a is not None}
        addresses = [0 if a is None else a.ctypes.data for a in self.arguments.values()]
        block = struct.pack(f"<{len(addresses)}Q", *addresses) + self.scalars
        tensors = {name: (a.ctypes.data, a.nbytes) for name, a in given.items()}
        findings = [f for f in twin.launch("run", self.blocks, block, tensors, goes_on=True)
                    if f.severity == "error"]  # fmt: skip
        errors = {name: self._error(name) for name in self.expected}
        new = [f for f in findings if (self.name, f.check) not in KNOWN]
        right = all(error < TOLERANCE for error in errors.values())
        shown = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
        print(f"{'right' if right else 'WRONG'}  {self.name}: {shown}; {len(findings)} findings")
        for finding in new:
            print(f"       {finding}")
        for finding in findings:
            if finding not in new:
                print(f"       known: {finding.check}: {KNOWN[self.name, finding.check]}")
        return right and not new

    def _error(self, name: str) -> float:
        expected = self.expected[name]
        error = numbers(self.arguments[name]) - expected
        return float(np.sqrt((error**2).mean() / (expected**2).mean()))


def convolution(root: pathlib.Path, draw) -> Run:
    """sgl's decoding step: five sequences with one token each, and a pool of eight states."""
    sequences, channels, width, slots, blocks = 5, 256, 4, 8, 3
    x, weight, state, bias = (
        bf16(draw.standard_normal(shape))
        for shape in ((sequences, 1, channels), (width, channels), (slots, width - 1, channels),
                      (channels,))
    )  # fmt: skip
    slot = np.array([3, 0, 7, 1, 5], np.int32)
    each = -(-sequences // blocks)
    tiling = np.array([blocks, each, sequences - each * (blocks - 1), sequences, 1, channels, width,
                       width - 1, 1, 1, 0, 0, 1, -1])  # fmt: skip
    states, y = numbers(state), np.zeros(x.shape)
    for i in range(sequences):
        window = np.concatenate([states[slot[i]], numbers(x)[i]])
        sums = (window * numbers(weight)).sum(0) + numbers(bias)
        y[i, 0], states[slot[i]] = sums * sigmoid(sums), window[1:]
    spare = np.zeros(64, np.uint8)
    source = """#include "causal_conv1d_update.cpp"
extern "C" __global__ __aicore__ void run(GM_ADDR x, GM_ADDR weight, GM_ADDR state, GM_ADDR slot,
                                          GM_ADDR bias, GM_ADDR spare, GM_ADDR y, GM_ADDR tiling) {
  causal_conv1d_update_bfloat16_t(x, weight, state, slot, bias, spare, spare, y, spare, tiling);
}
"""
    arguments = {"x": x, "weight": weight, "state": state, "slot": slot, "bias": bias,
                 "spare": spare, "y": np.full_like(x, NAN), "tiling": tiling}  # fmt: skip
    folder = root / "csrc/causal_conv1d_update/op_kernel"
    return Run("sgl causal_conv1d_update", folder, source, arguments, b"", blocks,
               {"y": y, "state": states})  # fmt: skip


@dataclasses.dataclass
class Delta:
    """A decoding step of the gated delta rule: three sequences, two tokens each, bf16 states."""

    draw: np.random.Generator
    sequences = 3
    tokens = 2
    k_heads = 2
    v_heads = 4
    dim = 128
    slots = 8

    def __post_init__(self):
        shape, normal = (self.sequences, self.tokens), self.draw.standard_normal
        self.q, self.k = (bf16(normal((*shape, self.k_heads, self.dim))) for _ in range(2))
        self.v = bf16(normal((*shape, self.v_heads, self.dim)))
        self.beta = bf16(normal((*shape, self.v_heads)))
        self.state = bf16(normal((self.slots, self.v_heads, self.dim, self.dim)) * 0.3)
        self.g = (-np.abs(normal((*shape, self.v_heads))) * 0.3).astype(np.float32)
        self.slot = np.array([[3, 3], [0, 0], [6, 6]], np.int32)
        self.scale = self.dim**-0.5

    def right(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the outputs and the states; a state is [value, key]."""
        out, states = np.zeros(self.v.shape), numbers(self.state)
        for i in range(self.sequences):
            for h in range(self.v_heads):
                state = states[self.slot[i, 0], h]
                for t in range(self.tokens):
                    of = i, t, h // (self.v_heads // self.k_heads)
                    q, k = numbers(self.q[of]), numbers(self.k[of])
                    q, k = (x / np.sqrt((x * x).sum() + 1e-6) for x in (q, k))
                    beta = sigmoid(numbers(self.beta[i, t, h : h + 1])[0])
                    state = state * np.exp(np.float64(self.g[i, t, h]))
                    change = (numbers(self.v[i, t, h]) - state @ k) * beta
                    state = state + np.outer(change, k)
                    out[i, t, h] = state @ q * self.scale
                states[self.slot[i, 0], h] = state
        return out, states


def sgl_delta(root: pathlib.Path, draw) -> Run:
    step = Delta(draw)
    out, states = step.right()
    flat = (step.sequences, step.tokens, -1)
    mixed = np.concatenate([x.reshape(flat) for x in (step.q, step.k, step.v)], -1)
    rows, rest = cut(step.v_heads, step.dim, step.dim)
    lengths = np.full(step.sequences, step.tokens, np.int32)
    arguments = {
        "mixed": mixed, "beta": step.beta, "state": step.state, "lengths": lengths,
        "slot": step.slot, "drafted": None, "cache": None, "g": step.g, "gk": None,
        "accepted": None, "out": np.full(step.v.shape, NAN, np.uint16),
    }  # fmt: skip
    sizes = struct.pack(
        "<6I3?xIIf", step.sequences, step.tokens, step.k_heads, step.dim, step.v_heads, step.dim,
        False, False, True, rows, rest, step.scale,
    )  # fmt: skip
    source = """#include "recurrent_gated_delta_rule_kernel.cpp"
extern "C" __global__ __aicore__ void run(
    GM_ADDR mixed, GM_ADDR beta, GM_ADDR state, GM_ADDR lengths, GM_ADDR slot, GM_ADDR drafted,
    GM_ADDR cache, GM_ADDR g, GM_ADDR gk, GM_ADDR accepted, GM_ADDR out, uint32_t b, uint32_t s,
    uint32_t nk, uint32_t dk, uint32_t nv, uint32_t dv, bool intermediate, bool accepts, bool gates,
    uint32_t rows, uint32_t rest, float scale) {
  recurrent_gated_delta_rule(mixed, beta, state, lengths, slot, drafted, cache, g, gk, accepted,
                             out, state, b, s, nk, dk, nv, dv, intermediate, accepts, gates, rows,
                             rest, scale);
}
"""
    folder = root / "csrc/recurrent_gated_delta_rule/op_kernel"
    return Run("sgl recurrent_gated_delta_rule", folder, source, arguments, sizes, 4,
               {"out": out, "state": states})  # fmt: skip


def cut(heads: int, v_dim: int, k_dim: int) -> tuple[int, int]:
    """Return rows of a state per tile, and the rest of the unified buffer in bytes.

    The formula is that of upstream's host code.
    """

    def up(value: int, unit: int) -> int:
        return -(-value // unit) * unit

    memory, heads, v_dim, k_dim = 192 * 1024, up(heads, 16), up(v_dim, 16), up(k_dim, 16)
    queues = 8 * (4 * k_dim + 2 * v_dim) + 128 + 8 * 6 * heads
    floats = 8 * (8 * k_dim + 4 * v_dim + 4 * heads)
    rows = (memory - queues - floats) // (4 * k_dim + 4 + 8 * k_dim + 8) // 8 * 8
    rows = up(-(-v_dim // -(-v_dim // rows)), 8)
    return rows, memory - queues - (4 * k_dim + 4) * rows


def vllm_rotary(root: pathlib.Path, draw) -> Run:
    """In-place rotation of neighbouring pairs in 64 of a head's 96 elements; 9 tokens, 2 cores."""
    tokens, heads, width, rotated, start, each = 9, 3, 96, 64, 16, 5
    x = bf16(draw.standard_normal((tokens, heads, width)))
    angle = np.repeat(draw.uniform(-4, 4, (tokens, rotated // 2)), 2, axis=1)
    cos, sin = bf16(np.cos(angle)), bf16(np.sin(angle))
    part = numbers(x)[..., start : start + rotated]
    pairs = part.reshape(tokens, heads, -1, 2)
    swapped = np.stack([-pairs[..., 1], pairs[..., 0]], -1).reshape(part.shape)
    right = numbers(x)
    right[..., start : start + rotated] = (
        part * numbers(cos)[:, None] + swapped * numbers(sin)[:, None]
    )
    # Two tokens per turn: the first core has three turns, of which the last has one token; the
    # second core has two.
    tiling = np.array([2, heads, rotated, width, 2, 3, 2, 1, 2, start, each], np.int64)
    source = """#include <kernel_operator.h>
struct RopeRegbaseTilingData {
  int64_t usedCoreNum, numHead, headDim, allHeadDim, coreTUbLoopTime, coreBUbLoopTime,
      coreTUbLoopTail, coreBUbLoopTail, ubFactor, start, blockFactor;
};
#include "inplace_partial_rotary_mul.h"
extern "C" __global__ __aicore__ void run(GM_ADDR x, GM_ADDR cos, GM_ADDR sin, GM_ADDR tiling) {
  const auto data = *reinterpret_cast<__gm__ RopeRegbaseTilingData*>(tiling);
  AscendC::TPipe pipe;
  InplacePartialRotaryMul::InplacePartialRotaryMulABA<bfloat16_t, true, bfloat16_t> op;
  op.Init(x, cos, sin, x, nullptr, &data, &pipe);
  op.Process();
}
"""
    folder = root / "csrc/attention/inplace_partial_rotary_mul/op_kernel"
    arguments = {"x": x, "cos": cos, "sin": sin, "tiling": tiling}
    return Run("vllm inplace_partial_rotary_mul", folder, source, arguments, b"", 2, {"x": right})


def vllm_cut(heads: int, v_dim: int, k_dim: int) -> tuple[int, tuple[int, int], int]:
    """Like `cut`, also with the number of result buffers: the most that the fewest tiles allow."""
    memory, heads = 192 * 1024, -(-heads // 16) * 16
    queues = 16 * (4 * k_dim + 2 * v_dim) + 128 + 16 * 6 * heads
    floats = 16 * (8 * k_dim + 4 * v_dim + 4 * heads)
    found = {}
    for stored in ((1, 1), (1, 2), (2, 2), (3, 3)):
        each = (2 + 2 * stored[0]) * k_dim + 4 * stored[1]
        most = (memory - queues - floats) // (each + 8 * k_dim + 8) // 8 * 8
        tiles = -(-v_dim // most)
        rows = -(-v_dim // tiles // 8) * 8
        found[-tiles, sum(stored)] = rows, stored, memory - queues - each * rows
    return found[max(found)]


def vllm_delta(root: pathlib.Path, draw) -> Run:
    """Three sequences of two tokens, with a slot for each token's state.

    Unlike sgl's kernel it does not normalise q and k, and applies no sigmoid to beta.
    """
    step = Delta(draw)
    for x in (step.q, step.k):
        wide = numbers(x)
        x[...] = bf16(wide / np.sqrt((wide * wide).sum(-1, keepdims=True)))
    step.beta = bf16(sigmoid(numbers(step.beta)))
    slots = np.array([[3, 1], [0, 7], [6, 2]], np.int32)
    out, states = np.zeros(step.v.shape), numbers(step.state)
    for i in range(step.sequences):
        for h in range(step.v_heads):
            state = states[slots[i, 0], h]
            for t in range(step.tokens):
                of = i, t, h // (step.v_heads // step.k_heads)
                q, k, v = numbers(step.q[of]), numbers(step.k[of]), numbers(step.v[i, t, h])
                state = state * np.exp(np.float64(step.g[i, t, h]))
                beta = numbers(step.beta[i, t, h : h + 1])[0]
                state = state + np.outer((v - state @ k) * beta, k)
                out[i, t, h], states[slots[i, t], h] = state @ q * step.scale, state
    # The start of the first sequence, then each sequence's length.
    lengths = np.array([0] + [step.tokens] * step.sequences, np.int32)
    rows, stored, rest = vllm_cut(step.v_heads, step.dim, step.dim)
    tiling = np.frombuffer(struct.pack(
        "<13If3I", 4, 0, rest, step.sequences * step.tokens, step.k_heads, step.dim, step.v_heads,
        step.dim, step.slots, step.sequences, rows, *stored, step.scale, True, False, False,
    ), np.uint8).copy()  # fmt: skip
    source = """#include <kernel_operator.h>
#include "recurrent_gated_delta_rule.h"
extern "C" __global__ __aicore__ void run(GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR beta,
                                          GM_ADDR state, GM_ADDR lengths, GM_ADDR slots, GM_ADDR g,
                                          GM_ADDR out, GM_ADDR tiling) {
  using namespace RecurrentGatedDeltaRule;
  const auto data = *reinterpret_cast<__gm__ RecurrentGatedDeltaRuleTilingData*>(tiling);
  AscendC::TPipe pipe;
  RGDR<bfloat16_t, bfloat16_t, bfloat16_t> op(&data);
  op.Init({q, k, v, g, nullptr, beta, state, lengths, slots, nullptr, out, state}, &pipe);
  op.Process();
}
"""
    arguments = {
        "q": step.q, "k": step.k, "v": step.v, "beta": step.beta, "state": step.state,
        "lengths": lengths, "slots": slots, "g": step.g,
        "out": np.full(step.v.shape, NAN, np.uint16), "tiling": tiling,
    }  # fmt: skip
    folder = root / "csrc/attention/recurrent_gated_delta_rule/op_kernel"
    return Run("vllm recurrent_gated_delta_rule", folder, source, arguments, b"", 4,
               {"out": out, "state": states})  # fmt: skip


SGL: tuple[Callable, ...] = (convolution, sgl_delta)
VLLM: tuple[Callable, ...] = (vllm_rotary, vllm_delta)


def runs(options) -> Iterator[Run]:
    if options.sgl:
        for make in SGL:
            yield make(options.sgl, np.random.default_rng(0))
    if options.vllm:
        for make in VLLM:
            yield make(options.vllm, np.random.default_rng(0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sgl", type=pathlib.Path, help="a checkout of sgl-kernel-npu")
    parser.add_argument("--vllm", type=pathlib.Path, help="a checkout of vllm-ascend")
    options = parser.parse_args()
    wrong = 0
    for run in runs(options):
        try:
            wrong += not run.judge()
        except EmulatorError as error:
            wrong += 1
            print(f"WRONG  {run.name}: {error}")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
