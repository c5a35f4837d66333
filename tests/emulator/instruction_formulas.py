"""Computes a vector core's instructions in numpy, written only from their descriptions.

Nothing here comes from csrc/twin. bf16 numbers are uint16 bit patterns, as numpy has no bf16.
"""

from __future__ import annotations

import numpy as np

TYPES = {
    "half": np.dtype(np.float16), "float": np.dtype(np.float32), "bfloat16_t": np.dtype(np.uint16),
    "int8_t": np.dtype(np.int8), "uint8_t": np.dtype(np.uint8), "int16_t": np.dtype(np.int16),
    "uint16_t": np.dtype(np.uint16), "int32_t": np.dtype(np.int32),
    "uint32_t": np.dtype(np.uint32), "int64_t": np.dtype(np.int64),
}  # fmt: skip
SHORT = {"f32": "float", "f16": "half", "bf16": "bfloat16_t", "s64": "int64_t", "s32": "int32_t",
         "s16": "int16_t", "s8": "int8_t", "u8": "uint8_t"}  # fmt: skip
GREATEST = {"half": 2.0**16, "bfloat16_t": 2.0**128, "float": 2.0**128}


def relu(x):
    return np.where(x > 0, x, np.zeros_like(x))


# x and y: sources. z: the target's old value. Floats are computed in fp32, integers in their type.
BINARY = {
    "vadd": lambda x, y, z: x + y,
    "vsub": lambda x, y, z: x - y,
    "vmul": lambda x, y, z: x * y,
    "vdiv": lambda x, y, z: x / y,
    "vmadd": lambda x, y, z: x * z + y,
    "vmaddrelu": lambda x, y, z: relu(x * z + y),
    "vaddrelu": lambda x, y, z: relu(x + y),
    "vsubrelu": lambda x, y, z: relu(x - y),
    "vmax": lambda x, y, z: np.maximum(x, y),
    "vmin": lambda x, y, z: np.minimum(x, y),
    "vand": lambda x, y, z: x & y,
    "vor": lambda x, y, z: x | y,
    "vmla": lambda x, y, z: x * y + z,
}
SCALAR = {
    "vadds": lambda x, s, z: x + s,
    "vmuls": lambda x, s, z: x * s,
    "vlrelu": lambda x, s, z: np.where(x >= 0, x, x * s),
    "vmaxs": lambda x, s, z: np.maximum(x, s),
    "vmins": lambda x, s, z: np.minimum(x, s),
    "vaxpy": lambda x, s, z: x * s + z,
    "vshl": lambda x, s, z: x << s,
}
UNARY = {
    "vexp": lambda x: np.exp(x.astype(np.float64)),
    "vln": lambda x: np.log(x.astype(np.float64)),
    "vsqrt": lambda x: np.sqrt(x.astype(np.float64)),
    "vrsqrt": lambda x: 1 / np.sqrt(x.astype(np.float64)),
    "vrec": lambda x: 1 / x.astype(np.float64),
    "vabs": np.abs,
    "vrelu": relu,
    "vnot": np.invert,
}
# Allowed relative error: 8 bits for the estimates, else the last bit.
ROUGH = {"vrec": 2.0**-8, "vrsqrt": 2.0**-8, "vexp": 2.0**-23, "vln": 2.0**-23, "vsqrt": 2.0**-23}
COMPARE = {"lt": np.less, "gt": np.greater, "le": np.less_equal, "ge": np.greater_equal,
           "eq": np.equal, "ne": np.not_equal}  # fmt: skip


def wide(values: np.ndarray, kind: str) -> np.ndarray:
    """Return values to compute with: bf16 patterns and fp16 as fp32, others unchanged."""
    if kind == "bfloat16_t":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32) if kind == "half" else values


def narrow(values: np.ndarray, kind: str) -> np.ndarray:
    """Round once to the nearest value of a type."""
    if kind == "bfloat16_t":
        return rounded(values, kind, "r")
    return values.astype(TYPES[kind])


def rounded(values: np.ndarray, kind: str, how: str) -> np.ndarray:
    """Round to a float type, found by trying both neighbours.

    how: to nearest even (r), to nearest with ties away from zero (a), down (f), up (c), towards
    zero (z), to odd (o).
    """
    exact = values.astype(np.longdouble)
    limit = np.longdouble(GREATEST[kind])
    exact = np.where(
        np.isfinite(exact), np.clip(exact, -limit * (1 - 1e-9), limit * (1 - 1e-9)), exact
    )
    below, above = _neighbours(exact, kind)
    low, high = _value(below, kind), _value(above, kind)
    middle = (low + high) / 2
    odd = below.astype(np.int64) % 2 == 1
    up = {
        "r": (exact > middle) | ((exact == middle) & odd),
        "a": (exact > middle) | ((exact == middle) & (exact > 0)),
        "f": np.zeros(exact.shape, bool),
        "c": np.ones(exact.shape, bool),
        "z": exact < 0,
        "o": ~odd,
    }[how]
    bits = np.where(low == exact, below, np.where(high == exact, above, np.where(up, above, below)))
    bits = np.where(np.isinf(exact), np.where(exact > 0, below, above), bits)
    bits = np.where(np.isnan(exact), _nan(kind), bits)
    zero = (_value(bits, kind) == 0) & np.signbit(exact)
    sign = 1 << (8 * TYPES[kind].itemsize - 1)
    return np.where(zero, sign, bits).astype(f"u{TYPES[kind].itemsize}").view(TYPES[kind])


def _value(bits: np.ndarray, kind: str) -> np.ndarray:
    """Return the numbers of bit patterns; infinity counts as the next number after the largest."""
    plain = bits.astype(f"u{TYPES[kind].itemsize}")
    floats = wide(plain, kind) if kind == "bfloat16_t" else plain.view(TYPES[kind])
    with np.errstate(invalid="ignore"):
        found = floats.astype(np.longdouble)
    return np.where(np.isinf(found), np.copysign(np.longdouble(GREATEST[kind]), found), found)


def _nan(kind: str) -> int:
    return {"half": 0x7E00, "bfloat16_t": 0x7FFF, "float": 0x7FC00000}[kind]


def _neighbours(exact: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return bit patterns of each number's neighbours: the next one not above, and not below."""
    bits = 8 * TYPES[kind].itemsize
    infinity = {"half": 0x7C00, "bfloat16_t": 0x7F80, "float": 0x7F800000}[kind]
    size = np.abs(exact)
    low, high = np.zeros(exact.shape, np.int64), np.full(exact.shape, infinity, np.int64)
    for _ in range(bits):
        middle = (low + high + 1) // 2
        fits = _value(middle, kind) <= size
        low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
    next_up = np.where(_value(low, kind) == size, low, np.minimum(low + 1, infinity))
    sign = np.int64(1) << (bits - 1)
    negative = exact < 0
    return np.where(negative, next_up + sign, low), np.where(negative, low + sign, next_up)


def whole(values: np.ndarray, how: str) -> np.ndarray:
    """Round to integers."""
    away = np.copysign(np.floor(np.abs(values) + 0.5), values)
    return {"r": np.rint(values), "a": away, "f": np.floor(values), "c": np.ceil(values),
            "z": np.trunc(values)}[how]  # fmt: skip


def converted(values: np.ndarray, source: str, target: str, how: str) -> np.ndarray:
    numbers = wide(values, source)
    if target in GREATEST:
        if source == target:
            return whole(numbers.astype(np.float64), how).astype(np.float32)
        return (
            numbers if source in GREATEST and target == "float" else rounded(numbers, target, how)
        )
    limits = np.iinfo(TYPES[target])
    if source not in GREATEST:
        return np.clip(numbers, limits.min, limits.max).astype(TYPES[target])
    numbers = whole(np.nan_to_num(numbers.astype(np.float64), nan=0.0, posinf=1e300, neginf=-1e300),
                    how)  # fmt: skip
    result = np.zeros(numbers.shape, TYPES[target])
    inside = (numbers > limits.min) & (numbers < limits.max)
    result[inside] = numbers[inside].astype(TYPES[target])
    result[numbers >= limits.max], result[numbers <= limits.min] = limits.max, limits.min
    return result
