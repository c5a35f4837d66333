"""Every instruction of csrc/twin against numpy formulas, on random operands.

Strides, repeats and masks are random too: full masks, tails, scattered bits, counts. An instruction
must change the unified buffer exactly where the formula does, bit for bit. Elementwise instructions
are here; test_instructions_across.py has the others.
"""

import re

import instruction_formulas as formulas
import numpy as np
import pytest
from instruction_calls import TRIES, Call, all_names, check, elementwise, kinds_of, names
from instruction_formulas import TYPES
from npu_ops_emulator import headers

pytestmark = pytest.mark.skipif(headers.why_not() is not None, reason=str(headers.why_not()))


@pytest.mark.parametrize("instruction", formulas.BINARY)
def test_two_operands(instruction):
    for name in names(instruction):
        _, target, source = kinds_of(name)

        def formula(x, y, z, target=target, source=source):
            numbers = [formulas.wide(v, k) for v, k in ((x, source), (y, source), (z, target))]
            return formulas.narrow(formulas.BINARY[instruction](*numbers), target)

        for seed in range(TRIES):
            call = Call(name, seed)
            expect = elementwise(call, target, source, formula)
            check(call, lambda image, expect=expect: expect(image) and None)


@pytest.mark.parametrize("instruction", formulas.SCALAR)
def test_a_scalar(instruction):
    for name in names(instruction):
        _, target, source = kinds_of(name)
        for seed in range(TRIES):
            call = Call(name, seed)
            if instruction == "vshl":
                call.scalar = float(call.draw.integers(0, 8 * TYPES[source].itemsize))
            elif source in formulas.GREATEST:
                call.scalar = float(np.float16(call.draw.standard_normal()))
            else:
                call.scalar = float(call.draw.integers(-1000, 1000))
            scalar = TYPES["float" if source == "half" else source].type(call.scalar)

            def formula(x, _, z, scalar=scalar, target=target, source=source):
                wide = formulas.wide(x, source), scalar, formulas.wide(z, target)
                return formulas.narrow(formulas.SCALAR[instruction](*wide), target)

            expect = elementwise(call, target, source, formula, operands=1)
            check(call, lambda image, expect=expect: expect(image) and None)


@pytest.mark.parametrize("instruction", formulas.UNARY)
def test_one_operand(instruction):
    for name in names(instruction):
        _, kind, _ = kinds_of(name)

        def formula(x, _, z, kind=kind):
            return formulas.narrow(formulas.UNARY[instruction](formulas.wide(x, kind)), kind)

        for seed in range(TRIES):
            call = Call(name, seed)
            expect = elementwise(call, kind, kind, formula, operands=1)
            if instruction in ("vln", "vsqrt", "vrsqrt"):
                call.fill(
                    call.a, kind, np.abs(call.numbers(16 * 1024 // TYPES[kind].itemsize, kind))
                )

            def roughly(image, expect=expect):
                written = expect(image)
                error = formulas.ROUGH.get(instruction)
                return error and (*written, error)

            check(call, roughly)


def test_copies():
    """A mask's count is per repeat, as in AscendC's Broadcast: up to 299 elements, 4 repeats."""
    assert names("vcopy")
    for name in names("vcopy"):
        _, kind, _ = kinds_of(name)
        for seed in range(3 * TRIES):
            call = Call(name, seed)
            # Repeats must not overlap: the guide does not define the order of their writes.
            call.to = (call.to[0], 1, 300 * TYPES[kind].itemsize // 32 + 1)
            expect = elementwise(call, kind, kind, lambda x, *_: x, operands=1, of_each=True)
            check(call, lambda image, expect=expect: expect(image) and None)


@pytest.mark.parametrize("kind", ["int16_t", "uint16_t", "int32_t", "uint32_t"])
def test_shift_right(kind):
    for seed in range(2 * TRIES):
        call = Call(f"vshr.{kind}", seed)
        distance = int(call.draw.integers(0, 8 * TYPES[kind].itemsize))
        call.scalar, call.more[0] = float(distance), seed % 2
        rounds = seed % 2 and kind.startswith("int") and distance

        def formula(x, _, z, distance=distance, rounds=rounds):
            wide = x.astype(np.int64)
            return ((wide >> distance) + (wide >> (distance - 1) & 1 if rounds else 0)).astype(
                x.dtype
            )

        expect = elementwise(call, kind, kind, formula, operands=1)
        check(call, lambda image, expect=expect: expect(image) and None)


_PAIR = re.compile(r"({0})2({0})".format("|".join(formulas.SHORT)))
# Numbers at which conversions differ.
SPECIAL = [0.0, -0.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.49999997, 1e-8, -1e-8, 65504.0, 65519.0,
           65520.0, 70000.0, -65520.0, 3e38, -3e38, 2147483648.0, -2147483904.0, 32767.5, -32769.0,
           127.5, 255.5, np.inf, -np.inf, np.nan, 5.96e-8, 2.9e-8, 1e-40]  # fmt: skip


PAIRS = """f322f32 f322f16 f322bf16 f322s64 f322s32 f322s16 f162s32 f162s16 f162s8 f162u8 bf162s32
s162f16 s322f32 s642f32 f162f32 bf162f32 u82f16 s82f16 s162f32 s322s64 s642s32 s322s16""".split()


@pytest.mark.parametrize("pair", PAIRS)
def test_conversions(pair):
    source, target = (formulas.SHORT[k] for k in _PAIR.fullmatch(pair).groups())
    for name in (n for n in all_names() if re.fullmatch(rf"vconv_{pair}[rafczo]?", n)):
        how = name.removeprefix(f"vconv_{pair}") or "r"
        for seed in range(TRIES):
            call = Call(name, seed)

            def formula(x, _, z, how=how):
                return formulas.converted(x, source, target, how)

            expect = elementwise(call, target, source, formula, operands=1)
            count = 16 * 1024 // TYPES[source].itemsize
            if source in formulas.GREATEST:
                scale = 10.0 ** call.draw.integers(-6, 6, count)
                numbers = (scale * call.draw.standard_normal(count)).astype(np.float32)
                numbers[:: count // len(SPECIAL) + 1] = SPECIAL[: len(numbers[:: count // 30 + 1])]
                numbers[: len(SPECIAL)] = SPECIAL
                call.fill(call.a, source, formulas.narrow(numbers, source))
            check(call, lambda image, expect=expect: expect(image) and None)


@pytest.mark.parametrize("value", [0.5, 1.5, -2.5, 0.7, -0.2, 3e9, -3e9, float("nan"), 2049.5])
def test_scalar_conversions(value):
    for how in "rafcz":
        call = Call(f"conv_f322s32{how}", 0)
        call.scalar = value
        call.run()
        right = formulas.converted(np.array([value], np.float32), "float", "int32_t", how)
        assert call.left[2:3].view(np.int32)[0] == right[0]
    call = Call("conv_f322f16o", 0)
    call.scalar = value
    call.run()
    right = formulas.rounded(np.array([value], np.float32), "half", "o").view(np.uint16)
    assert call.left[2:3].view(np.uint16)[0] == right[0]
