"""Makes random calls of the instructions in csrc/twin, and checks the unified buffer afterwards."""

from __future__ import annotations

import ctypes
import functools
import pathlib
import struct

import instruction_formulas as formulas
import numpy as np
from instruction_formulas import TYPES
from npu_ops_emulator import headers, twins

SOURCE = pathlib.Path(__file__).parent / "kernels" / "instructions.cpp"

BYTES = 64 * 1024
TO, A, B, MORE = 0, 16 * 1024, 32 * 1024, 48 * 1024  # start addresses of operands
TRIES = 4


class Mask:
    """The elements that take part: a mask of 128 bits per repeat, or a count over all repeats."""

    def __init__(self, draw):
        self.counts = bool(draw.integers(3) == 0)
        kind = draw.integers(3)
        bits = draw.integers(0, 2, 128) if kind == 0 else np.ones(128, int)
        if kind == 1:
            bits[draw.integers(1, 64) :] = 0
        bits[0] |= 1
        self.bits = bits.astype(bool)
        self.count = int(draw.integers(1, 300))

    def words(self) -> tuple[int, int]:
        if self.counts:
            return self.count, 0
        low, high = (
            int("".join("01"[int(b)] for b in half[::-1]), 2) for half in np.split(self.bits, 2)
        )
        return low, high

    def repeats(self, given: int, each: int) -> int:
        return -(-self.count // each) if self.counts else given

    def elements(
        self, given: int, each: int, of_each: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (repeat, index within it) of the elements that take part.

        given: number of repeats. each: elements of a repeat.
        of_each: a count applies to each repeat, not to all repeats together.
        """
        if self.counts and of_each:
            return np.divmod(np.arange(given * self.count), self.count)
        if self.counts:
            return np.divmod(np.arange(self.count), each)
        (chosen,) = np.nonzero(self.bits[:each])
        return np.repeat(np.arange(given), len(chosen)), np.tile(chosen, given)


class Call:
    """A random call of an instruction, with the unified buffer's initial contents."""

    def __init__(self, name: str, seed: int):
        self.draw = draw = np.random.default_rng(seed)
        self.name, self.mask = name, Mask(draw)
        self.image = draw.integers(0, 256, BYTES).astype(np.uint8)
        self.other = draw.integers(0, 256, BYTES).astype(np.uint8)
        self.scalar = 0.0
        self.repeats = int(draw.integers(1, 5))
        block, span = int(draw.integers(1, 4)), int(draw.integers(0, 3))
        self.to = (TO, block, 8 * block + span)
        self.a = (A, int(draw.integers(0, 4)), int(draw.integers(0, 25)))
        self.b = (B, int(draw.integers(0, 4)), int(draw.integers(0, 25)))
        self.more = [0] * 6
        self.left = None

    def fill(self, operand, kind: str, values: np.ndarray | None = None) -> None:
        """Write numbers of a type to an operand's memory."""
        part = self.image[operand[0] : operand[0] + 16 * 1024].view(TYPES[kind])
        part[:] = self.numbers(len(part), kind) if values is None else values

    def numbers(self, count: int, kind: str) -> np.ndarray:
        if kind in formulas.GREATEST:
            return formulas.narrow((4 * self.draw.standard_normal(count)).astype(np.float32), kind)
        limits = np.iinfo(TYPES[kind])
        return self.draw.integers(limits.min, limits.max, count, TYPES[kind], endpoint=True)

    def places(self, operand, kind: str, repeats: np.ndarray, elements: np.ndarray) -> np.ndarray:
        """Return the elements' positions, counted in elements from the start of the buffer."""
        start, block, repeat = operand
        size = TYPES[kind].itemsize
        each = 32 // size
        blocks = repeats * repeat + elements // each * block
        return (start + 32 * blocks) // size + elements % each

    def run(self) -> np.ndarray:
        """Run the call; return the buffer afterwards. Some calls also write to `other`.

        The twin must report no finding.
        """
        out, left = np.zeros_like(self.image), np.zeros(4, np.uint64)
        tensors = {"in": self.image, "out": out, "other": self.other, "left": left}
        addresses = [array.ctypes.data for array in tensors.values()]
        (to, to_block, to_repeat), (a, a_block, a_repeat) = self.to, self.a
        b, b_block, b_repeat = self.b
        arguments = struct.pack(
            "<4Q32sQQqd16i", *addresses, self.name.encode(), *self.mask.words(), self.mask.counts,
            self.scalar, to, a, b, self.repeats, to_block, a_block, b_block, to_repeat, a_repeat,
            b_repeat, *self.more,
        )  # fmt: skip
        sizes = {name: (array.ctypes.data, array.nbytes) for name, array in tensors.items()}
        assert compiled().launch("instructions", 1, arguments, sizes) == []
        self.left = left
        return out


@functools.cache
def compiled() -> twins.Twin:
    return twins.compile(SOURCE)


def check(call: Call, expect) -> None:
    """Run a call and compare the buffer.

    expect(image): applies the formula to the image in place. It may return (kind, places, relative
    error) for results that are not exact.
    """
    expected = call.image.copy()
    with np.errstate(all="ignore"):
        actual = call.run()
        rough = expect(expected)
    if rough:
        kind, places, error = rough
        got, right = (
            formulas.wide(image.view(TYPES[kind])[places], kind).astype(np.float64)
            for image in (actual, expected)
        )
        step = 2.0**-10 if kind == "half" else 0.0
        np.testing.assert_allclose(got, right, rtol=max(error, step), atol=1e-7)
        expected.view(TYPES[kind])[places] = actual.view(TYPES[kind])[places]
    (wrong,) = np.nonzero(actual != expected)
    assert not len(wrong), f"{call.name}: byte {wrong[0]}, {len(wrong)} differ"


def elementwise(
    call: Call, target: str, source: str, formula, operands: int = 2, of_each: bool = False
):
    """Fill an elementwise call's operands; return the function for `check`. of_each: see `Mask`."""
    each = 256 // max(TYPES[target].itemsize, TYPES[source].itemsize)
    call.fill(call.to, target)
    call.fill(call.a, source)
    if operands > 1:
        call.fill(call.b, source)

    def expect(image):
        where = call.mask.elements(call.repeats, each, of_each)
        to = call.places(call.to, target, *where)
        x = image.view(TYPES[source])[call.places(call.a, source, *where)]
        z = image.view(TYPES[target])[to]
        y = image.view(TYPES[source])[call.places(call.b, source, *where)] if operands > 1 else None
        image.view(TYPES[target])[to] = formula(x, y, z)
        return target, to

    return expect


def kinds_of(name: str) -> tuple[str, str, str]:
    """Split an entry into its instruction and the types of target and source."""
    instruction, *kinds = name.split(".")
    return instruction, kinds[0], kinds[-1]


def names(*instructions: str) -> list[str]:
    """Return the entries of kernels/instructions.cpp for these instructions, e.g. "vadd.half"."""
    return [name for name in all_names() if name.split(".")[0] in instructions]


def all_names() -> list[str]:
    if headers.why_not():
        return []
    library = ctypes.CDLL(str(compiled().path))
    library.instruction_names.restype = ctypes.c_char_p
    return library.instruction_names().decode().split()
