"""Instructions of csrc/twin that compare, select, reduce, move and transpose, against numpy."""

import re

import instruction_formulas as formulas
import numpy as np
import pytest
from instruction_calls import MORE, TO, TRIES, A, B, Call, all_names, check
from instruction_formulas import TYPES
from npu_ops_emulator import headers

pytestmark = pytest.mark.skipif(headers.why_not() is not None, reason=str(headers.why_not()))
FLOATS = pytest.mark.parametrize("kind", ["half", "float"])
SEEDS = pytest.mark.parametrize("seed", range(2 * TRIES))


def few(call: Call, kind: str) -> np.ndarray:
    """Return small integers: many are equal, and their sums are exact in any order."""
    count = 16 * 1024 // TYPES[kind].itemsize
    return formulas.narrow(call.draw.integers(-8, 9, count).astype(np.float32), kind)


def whole_repeats(call: Call, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return all elements of the repeats, ignoring the mask."""
    each = 256 // TYPES[kind].itemsize
    return np.divmod(np.arange(call.mask.repeats(call.repeats, each) * each), each)


def put_bits(image: np.ndarray, start: int, bits: np.ndarray) -> None:
    """Write one bit per element, the first one to the lowest bit of a byte."""
    packed = np.packbits(bits, bitorder="little")
    image[start : start + len(packed)] = packed


def bits_of(image: np.ndarray, start: int, count: int) -> np.ndarray:
    return np.unpackbits(image[start : start + 8192], bitorder="little")[:count].astype(bool)


def left_bits(call: Call) -> np.ndarray:
    """Return CMPMASK after the call."""
    return np.unpackbits(call.left[:2].view(np.uint8), bitorder="little").astype(bool)


# ---- comparisons and selections ----


@FLOATS
@pytest.mark.parametrize("mode", formulas.COMPARE)
def test_compare(mode, kind):
    for seed in range(TRIES):
        call = Call(f"vcmpv_{mode}.{kind}", seed)
        call.fill(call.a, kind, few(call, kind))
        call.fill(call.b, kind, few(call, kind))

        def expect(image, call=call):
            x, y = (image.view(TYPES[kind])[call.places(o, kind, *whole_repeats(call, kind))]
                    for o in (call.a, call.b))  # fmt: skip
            put_bits(image, TO, formulas.COMPARE[mode](x, y))

        check(call, expect)


@FLOATS
@pytest.mark.parametrize("mode", formulas.COMPARE)
def test_compare_with_a_scalar(mode, kind):
    for seed in range(TRIES):
        call = Call(f"vcmpvs_{mode}.{kind}", seed)
        call.scalar = float(seed - 1)
        call.fill(call.a, kind, few(call, kind))

        def expect(image, call=call):
            x = image.view(TYPES[kind])[call.places(call.a, kind, *whole_repeats(call, kind))]
            put_bits(image, TO, formulas.COMPARE[mode](x, TYPES[kind].type(call.scalar)))

        check(call, expect)


@FLOATS
@pytest.mark.parametrize("mode", formulas.COMPARE)
def test_compare_into_the_register(mode, kind):
    for seed in range(TRIES):
        call = Call(f"vcmp_{mode}.{kind}", seed)
        call.mask.counts, call.repeats = False, 1
        call.fill(call.a, kind, few(call, kind))
        call.fill(call.b, kind, few(call, kind))
        call.run()
        where = call.mask.elements(1, 256 // TYPES[kind].itemsize)
        x, y = (
            call.image.view(TYPES[kind])[call.places(o, kind, *where)] for o in (call.a, call.b)
        )
        expected = np.zeros(128, bool)
        expected[where[1]] = formulas.COMPARE[mode](x, y)
        np.testing.assert_array_equal(left_bits(call), expected)


@FLOATS
@SEEDS
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_select(mode, seed, kind):
    """Mode 0 uses the same bits in each repeat; modes 1 and 2 use consecutive bits.

    Where a bit is 0, mode 1 takes a scalar, mode 2 the second tensor.
    """
    call = Call(f"vsel.{kind}", seed)
    each = 256 // TYPES[kind].itemsize
    call.scalar = 1.25
    call.more[:3] = mode, MORE, MORE + 8192
    for operand in (call.to, call.a, call.b):
        call.fill(operand, kind)

    def expect(image):
        repeats, elements = call.mask.elements(call.repeats, each)
        bits = bits_of(image, MORE, 64 * 1024)
        chosen = bits[elements] if mode == 0 else bits[repeats * each + elements]
        x, y = (image.view(TYPES[kind])[call.places(o, kind, repeats, elements)]
                for o in (call.a, call.b))  # fmt: skip
        other = TYPES[kind].type(call.scalar) if mode == 1 else y
        image.view(TYPES[kind])[call.places(call.to, kind, repeats, elements)] = np.where(
            chosen, x, other
        )
        if mode:  # instructions.cpp loaded CMPMASK from there
            size = TYPES[kind].itemsize if mode == 1 else 8
            image[MORE + 8192 : MORE + 8192 + size] = call.run()[MORE + 8192 : MORE + 8192 + size]

    check(call, expect)


PATTERNS = {1: "10", 2: "01", 3: "1000", 4: "0100", 5: "0010", 6: "0001", 7: "1"}


@SEEDS
@pytest.mark.parametrize("mode", range(8))
@pytest.mark.parametrize("kind", ["uint16_t", "uint32_t"])
def test_keep_some(kind, mode, seed):
    """Select by a fixed pattern, or by each repeat's own bits."""
    call = Call(f"vreducev2.{kind}", seed)
    call.more[0] = mode
    call.mask.count = min(call.mask.count, 256 // TYPES[kind].itemsize)
    each = call.mask.count if call.mask.counts else 256 // TYPES[kind].itemsize
    repeats, elements = np.divmod(np.arange(call.repeats * each), each)

    def expect(image):
        if mode:
            pattern = np.array([digit == "1" for digit in PATTERNS[mode]])
            kept = pattern[elements % len(pattern)]
        else:
            starts = B + 32 * call.b[2] * np.arange(call.repeats)
            kept = np.concatenate([bits_of(image, start, each) for start in starts])
        x = image.view(TYPES[kind])[call.places(call.a, kind, repeats, elements)[kept]]
        image.view(TYPES[kind])[: len(x)] = x
        call.kept = len(x)

    check(call, expect)
    assert call.left[3] == call.kept


# ---- reductions ----


def groups(call: Call, kind: str, size: int):
    """Yield (repeat, group, elements, positions) for each group with a selected element."""
    repeats, elements = call.mask.elements(call.repeats, 256 // TYPES[kind].itemsize)
    for repeat in np.unique(repeats):
        of_repeat = elements[repeats == repeat]
        for group in np.unique(of_repeat // size):
            chosen = of_repeat[of_repeat // size == group]
            yield (
                repeat,
                group,
                chosen,
                call.places(call.a, kind, np.full(len(chosen), repeat), chosen),
            )


BY_GROUP = {"vcgadd": np.sum, "vcgmax": np.max, "vcgmin": np.min, "vcpadd": np.sum}


@FLOATS
@SEEDS
@pytest.mark.parametrize("instruction", BY_GROUP)
def test_reduce_groups(instruction, kind, seed):
    call = Call(f"{instruction}.{kind}", seed)
    size = TYPES[kind].itemsize
    call.to = (TO, 1, int(call.draw.integers(1, 4)))
    call.fill(call.a, kind, few(call, kind))
    in_group, of_repeat = (2, 128 // size) if instruction == "vcpadd" else (32 // size, 8)

    def expect(image):
        values = image.view(TYPES[kind])
        for repeat, group, _, places in groups(call, kind, in_group):
            to = repeat * call.to[2] * of_repeat + group
            values[to] = BY_GROUP[instruction](formulas.wide(values[places], kind))

    check(call, expect)


@FLOATS
@SEEDS
def test_sum(kind, seed):
    """One sum per repeat, or one of all repeats in a register."""
    call = Call(f"vcadd.{kind}", seed)
    accumulate = call.more[0] = seed % 2
    call.to = (TO, 1, int(call.draw.integers(1, 4)))
    call.fill(call.a, kind, few(call, kind))
    total = 0.0

    def expect(image):
        nonlocal total
        values = image.view(TYPES[kind])
        for repeat, _, _, places in groups(call, kind, 1 << 20):
            value = formulas.wide(values[places], kind).sum()
            total += value
            if not accumulate:
                values[repeat * call.to[2]] = value

    check(call, expect)
    if accumulate:
        assert call.left[2:3].view(TYPES[kind])[0] == total


@FLOATS
@pytest.mark.parametrize("order", range(4))
@pytest.mark.parametrize("instruction, best", [("vcmax", np.argmax), ("vcmin", np.argmin)])
def test_best(instruction, best, order, kind):
    """Results: value and index in either order, only the value, or only the index."""
    for seed in range(TRIES):
        call = Call(f"{instruction}.{kind}", seed)
        call.to = (TO, 1, int(call.draw.integers(1, 4)))
        call.more[0] = order
        call.fill(call.a, kind, few(call, kind))
        bits = np.dtype(f"u{TYPES[kind].itemsize}")

        def expect(image, call=call, bits=bits):
            values, raw = image.view(TYPES[kind]), image.view(bits)
            for repeat, _, elements, places in groups(call, kind, 1 << 20):
                at = best(formulas.wide(values[places], kind))
                value, index = raw[places[at]], elements[at]
                if order == 3:
                    image.view(np.uint32)[repeat * call.to[2]] = index
                elif order == 2:
                    raw[repeat * call.to[2]] = value
                else:
                    pair = (value, index) if order == 0 else (index, value)
                    raw[2 * repeat * call.to[2] : 2 * repeat * call.to[2] + 2] = pair

        check(call, expect)


# ---- copies, gathers, transpositions ----


@pytest.mark.parametrize("kind", ["half", "float", "int16_t", "int32_t", "bfloat16_t"])
def test_duplicate(kind):
    for seed in range(TRIES):
        call = Call(f"vector_dup.{kind}", seed)
        call.scalar = float(call.draw.integers(-100, 100))

        def expect(image, call=call):
            where = call.mask.elements(call.repeats, 256 // TYPES[kind].itemsize)
            value = np.array(call.scalar, np.float32)
            value = formulas.narrow(value, kind) if kind in formulas.GREATEST else value
            image.view(TYPES[kind])[call.places(call.to, kind, *where)] = value

        check(call, expect)


@SEEDS
@pytest.mark.parametrize("kind", ["uint16_t", "uint32_t"])
def test_broadcast(kind, seed):
    call = Call(f"vbrcb.{kind}", seed)
    each = 32 // TYPES[kind].itemsize

    def expect(image):
        repeats, elements = np.divmod(np.arange(call.repeats * 8 * each), 8 * each)
        source = image[A:].view(TYPES[kind])[repeats * 8 + elements // each]
        image.view(TYPES[kind])[call.places(call.to, kind, repeats, elements)] = source

    check(call, expect)


@SEEDS
@pytest.mark.parametrize("kind", ["uint16_t", "uint32_t"])
@pytest.mark.parametrize("instruction", ["vgather", "vgatherb"])
def test_gather(instruction, kind, seed):
    """Gather elements, or whole blocks, by byte offsets."""
    call = Call(f"{instruction}.{kind}", seed)
    size = TYPES[kind].itemsize
    blocks = instruction == "vgatherb"
    unit = 32 if blocks else size
    call.fill(call.b, "uint32_t", unit * call.draw.integers(0, 16 * 1024 // unit, 4096))
    if not blocks:
        # the first seed runs in place
        call.to = (A if seed == 0 else TO, 1, 8 if seed == 0 else call.to[2])
        if seed == 0:  # offsets within the same repeat
            repeats, elements = np.divmod(np.arange(4096), 256 // size)
            offsets = np.minimum(repeats * 256 + (elements ^ 1) * size, 16 * 1024 - size)
            call.fill(call.b, "uint32_t", offsets)

    def expect(image):
        offsets = image[B : B + 16 * 1024].view(np.uint32).astype(np.int64)
        each = 256 // size
        if blocks:
            repeats, elements = np.divmod(np.arange(call.repeats * each), each)
            at = (A + offsets[repeats * 8 + elements // (32 // size)]) // size + elements % (
                32 // size
            )
        else:
            repeats, elements = call.mask.elements(call.repeats, each)
            at = (A + offsets[repeats * each + elements]) // size
        values = image.view(TYPES[kind])
        values[call.places(call.to, kind, repeats, elements)] = values[at]

    check(call, expect)


def test_transpose():
    call = Call("vtranspose.uint16_t", 0)

    def expect(image):
        matrix = image[A : A + 512].view(np.uint16).reshape(16, 16)
        image[TO : TO + 512].view(np.uint16)[:] = matrix.T.ravel()

    check(call, expect)


@SEEDS
@pytest.mark.parametrize("width", [1, 2, 4])
def test_scatter_blocks(width, seed):
    """Transposes sixteen blocks from any addresses into sixteen others."""
    call = Call(f"scatter_vnchwconv_b{8 * width}", seed)
    kind = np.dtype(f"u{width}")
    to_high, from_high = call.more[0], call.more[1] = seed % 2, seed // 2 % 2
    call.to, call.a = (TO, 1, 16), (A, 1, int(call.draw.integers(0, 20)))
    starts = call.draw.permutation(16) * 32
    sources = A + call.draw.integers(0, 100, 16) * 32
    image = call.image[B : B + 128].view(np.uint32)
    image[:] = np.concatenate((starts, sources))

    def expect(image):
        for repeat in range(call.repeats):
            rows = np.stack([image[at : at + 32] for at in sources + 32 * repeat * call.a[2]])
            rows = rows.view(kind)  # [16 blocks, elements per block]
            if width == 1:
                columns = rows[:, 16 * from_high : 16 * from_high + 16].T
            elif width == 2:
                columns = rows.T
            else:  # [16, 8] becomes 8 columns of 16; each fills two blocks
                columns = rows.T.reshape(16, 8)
            for e, start in enumerate(starts + 32 * repeat * call.to[2]):
                first = start + (16 * to_high if width == 1 else 0)
                new = np.ascontiguousarray(columns[e]).view(np.uint8)
                image[first : first + len(new)] = new

    check(call, expect)


# ---- between memories ----


def bursts(call: Call, unit: int):
    """Yield (target, source, length in bytes) of random bursts with gaps between them.

    target, source: slices that begin where the burst does.
    unit: lengths and gaps are multiples of so many bytes.
    """
    call.repeats = int(call.draw.integers(1, 6))
    call.more[0] = int(call.draw.integers(1, 20))
    call.a, call.to = (
        (start, 1, int(call.draw.integers(0, 8))) for start in (call.a[0], call.to[0])
    )
    length = call.more[0] * unit
    for i in range(call.repeats):
        yield (
            slice(call.to[0] + i * (length + call.to[2] * unit), None),
            slice(call.a[0] + i * (length + call.a[2] * unit), None),
            length,
        )


@SEEDS
@pytest.mark.parametrize("name", ["copy_gm_to_ubuf", "copy_ubuf_to_ubuf", "copy_ubuf_to_gm"])
def test_copy(name, seed):
    call = Call(name, seed)
    moves = list(bursts(call, 32))
    other = call.other.copy()

    def expect(image):
        target = other if name == "copy_ubuf_to_gm" else image
        for to, source, length in moves:
            target[to][:length] = call.image[source][:length]

    check(call, expect)
    np.testing.assert_array_equal(call.other, other)


@SEEDS
@pytest.mark.parametrize("width", [1, 2, 4])
def test_load_padded(width, seed):
    """Each burst fills whole blocks; the padding is a value, or the first element."""
    call = Call(f"copy_gm_to_ubuf_align_b{8 * width}", seed)
    call.repeats = int(call.draw.integers(1, 6))
    length = int(call.draw.integers(1, 40)) * width
    left, right = (int(n) for n in call.draw.integers(0, 32 // width, 2)) if seed % 2 else (0, 0)
    call.more[:3] = length, left, right
    call.a, call.to = (
        (A, 1, int(call.draw.integers(0, 100))),
        (TO, 1, int(call.draw.integers(0, 4))),
    )
    call.scalar = float(call.draw.integers(1, 100))
    filled = -(-(length + (left + right) * width) // 32) * 32
    kind = np.dtype(f"u{width}")

    def expect(image):
        for i in range(call.repeats):
            source = call.image[A + i * (length + call.a[2]) :][:length]
            burst = np.empty(filled, np.uint8)
            burst.view(kind)[:] = call.scalar if left or right else source[:width].view(kind)[0]
            burst[left * width : left * width + length] = source
            image[TO + i * (filled + 32 * call.to[2]) :][:filled] = burst

    check(call, expect)


ATOMIC = {0: lambda old, new: new, 1: np.add, 2: np.maximum, 3: np.minimum}
ADDED = ["float", "half", "bfloat16_t", "int32_t", "int16_t", "int8_t"]


@pytest.mark.parametrize("kind", ADDED)
@pytest.mark.parametrize("atomic", ATOMIC)
def test_store_padded(atomic, kind):
    """Bursts of any length replace the contents of global memory, or are added to them."""
    size = TYPES[kind].itemsize
    for seed in range(TRIES):
        call = Call(f"copy_ubuf_to_gm_align_b{8 * size}", seed)
        call.repeats = int(call.draw.integers(1, 6))
        length = call.more[0] = int(call.draw.integers(1, 40)) * size
        call.a, call.to = (
            (A, 1, int(call.draw.integers(0, 4))),
            (TO, 1, size * int(call.draw.integers(9))),
        )
        call.more[4:] = atomic, ADDED.index(kind)
        call.fill(call.a, kind)
        call.other.view(TYPES[kind])[:] = call.numbers(len(call.other) // size, kind)
        other = call.other.copy()
        for i in range(call.repeats):
            source = call.image[A + i * (-(-length // 32) * 32 + 32 * call.a[2]) :][:length]
            target = other[i * (length + call.to[2]) :][:length].view(TYPES[kind])
            old, new = (formulas.wide(v.view(TYPES[kind]), kind) for v in (target, source))
            target[:] = formulas.narrow(ATOMIC[atomic](old, new), kind)
        check(call, lambda image: None)
        np.testing.assert_array_equal(call.other, other)


def test_the_register_of_comparisons_is_stored():
    call = Call("get_cmpmask", 0)

    def expect(image):
        image[TO : TO + 16] = image[A : A + 16]

    check(call, expect)
    np.testing.assert_array_equal(call.left[:2].view(np.uint8), call.image[A : A + 16])


# Instructions that set registers or order pipes are tested by their effects, here or in
# test_twin.py.
ELSEWHERE = re.compile(r"(set|get)_|wait_flag")


def test_every_instruction_is_here():
    """Each instruction that CANN's headers call and csrc/twin defines has a test, as has each
    scalar conversion."""
    called, defined = headers._called(headers.staged() / "asc-devkit"), headers._defined()
    scalars = {name for name in defined if name.startswith("conv_")}
    tried = {name.split(".")[0] for name in all_names()}
    missing = (called & defined | scalars) - tried
    missing -= {"value_type"}  # the headers' own name, in a cast
    assert [name for name in missing if not ELSEWHERE.match(name)] == []
    assert len(called & defined) > 100
