"""Computes the scalar unit's operations exactly: integers, addresses, views.

The value None stands for an unknown number.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import re

from npu_ops_tools.model.ir import View, dense, view_type


def _quotient(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) if b else None


def _remainder(a, b):
    return a - b * _quotient(a, b) if b else None


BINARY = {
    "addi": operator.add, "subi": operator.sub, "muli": operator.mul,
    "addf": operator.add, "subf": operator.sub, "mulf": operator.mul,
    "divf": lambda a, b: a / b if b else None,
    "andi": operator.and_, "ori": operator.or_, "xori": operator.xor,
    "shli": operator.lshift, "shrsi": operator.rshift, "shrui": operator.rshift,
    "minsi": min, "maxsi": max, "minui": min, "maxui": max,
    "minnumf": min, "maxnumf": max, "minimumf": min, "maximumf": max,
    "divsi": _quotient, "divui": _quotient, "remsi": _remainder, "remui": _remainder,
    "floordivsi": lambda a, b: a // b if b else None,
    "ceildivsi": lambda a, b: -(-a // b) if b else None,
}  # fmt: skip
COMPARE = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip
SLOW = ("div", "rem", "floordiv", "ceildiv")  # division takes many cycles


def constant(text: str):
    """Return the value of "4095 : i32", "true" or "1.0e+00 : f32"; None for a tensor."""
    value = text.partition(" : ")[0].strip()
    if value in ("true", "false"):
        return int(value == "true")
    try:
        return int(value)
    except ValueError:
        pass
    try:
        return float(value)
    except ValueError:
        return None


def arith(name: str, text: str, values: list):
    """Compute an operation of the dialect `arith`."""
    if name == "select":
        condition, yes, no = values
        return None if condition is None else (yes if condition else no)
    if None in values:
        return None
    if name in ("cmpi", "cmpf"):
        return int(COMPARE[re.match(r"[suo]?(\w\w)\b", text)[1]](*values))
    if name in BINARY:
        return BINARY[name](*values)
    return _cast(name, text, values[0])


def _cast(name: str, text: str, value):
    bits = re.search(r"to i(\d+)$", text)
    if name in ("trunci", "index_cast") and bits and isinstance(value, int):
        size = int(bits[1])
        value &= (1 << size) - 1
        return value - (1 << size) if size > 1 and value >> (size - 1) else value
    return math.trunc(value) if name == "fptosi" and math.isfinite(value) else value


KNOWN_CASTS = {
    "index_cast", "trunci", "extsi", "extui", "sitofp", "uitofp", "fptosi", "extf", "truncf",
    "index_castui", "bitcast", "negf",
}  # fmt: skip


def knows(name: str) -> bool:
    return name in BINARY or name in KNOWN_CASTS or name in ("select", "cmpi", "cmpf")


def view(name: str, text: str, source, value) -> View | None:
    """Return the view that a `memref` operation makes of `source`; None if it is unknown.

    value: returns the value of a name.
    """
    return _VIEWS[name](text, source, value) if name in _VIEWS else None


def _result(text: str) -> View:
    return view_type(re.split(r" (?:to|into) ", text)[-1])


def _lists(text: str, value) -> list[list]:
    """Return the values in each bracketed list of an operation, e.g. its sizes.

    value: returns the value of a name or number.
    """
    found = re.findall(r"\[([^\[\]]*)\]", text.partition(" : ")[0])
    return [[value(item.strip()) for item in one.split(",") if item.strip()] for one in found]


def _subview(text: str, source: View, value) -> View:
    offsets, sizes, steps = _lists(text, value)[:3]
    strides = [_times(a, b) for a, b in zip(source.strides, steps, strict=True)]
    offset = _plus(source.offset, *(_times(a, b) for a, b in zip(offsets, source.strides)))  # noqa: B905
    result = _result(text)
    axes = list(zip(sizes, strides, strict=True))
    while len(axes) > len(result.shape):  # dimensions of size 1 are dropped
        axes.pop(next(i for i, (size, _) in enumerate(axes) if size == 1))
    shape, strides = zip(*axes, strict=True) if axes else ((), ())
    return dataclasses.replace(source, shape=shape, strides=strides, offset=offset)


def _reinterpret(text: str, source: View, value) -> View:
    offset, shape, strides = _lists(text, value)
    first = _plus(source.offset, offset[0])
    return dataclasses.replace(source, shape=tuple(shape), strides=tuple(strides), offset=first)


def _memory_view(text: str, source: View, value) -> View:
    result = _result(text)
    sizes = iter(_lists(text, value)[-1])
    shape = tuple(next(sizes) if size is None else size for size in result.shape)
    kept = {"argument": source.argument, "space": source.space, "offset": None}
    return dataclasses.replace(result, shape=shape, strides=dense(shape), **kept)


def _collapse(text: str, source: View, value) -> View:
    groups = _groups(text)
    shape = tuple(_product(source.shape[i] for i in group) for group in groups)
    strides = tuple(_inner_stride(source, group) for group in groups)
    return dataclasses.replace(source, shape=shape, strides=strides)


def _groups(text: str) -> list[list[int]]:
    """Parse "[[0, 1], [2]]": the axes that are merged into one, or split from one."""
    found = re.search(r"\[(?:\[[\d, ]*\](?:, )?)*\]", text)[0]
    return json.loads(found)


def _inner_stride(source: View, group: list[int]):
    """Return the stride of the innermost axis of a group whose size is not 1."""
    longer = [i for i in group if source.shape[i] != 1] or group
    return source.strides[longer[-1]]


def _expand(text: str, source: View, value) -> View:
    groups = _groups(text)
    sizes = _lists(text.partition("output_shape")[2], value)[0]
    strides = [0] * len(sizes)
    for group, run in zip(groups, source.strides, strict=True):
        for axis in reversed(group):
            strides[axis] = run
            run = _times(run, sizes[axis])
    return dataclasses.replace(source, shape=tuple(sizes), strides=tuple(strides))


def _base(text: str, source: View, value) -> View:
    """Return the base buffer. The other results (offset, sizes, strides) are not modelled."""
    return dataclasses.replace(source, shape=(), strides=(), offset=0)


def _same(text: str, source: View, value) -> View:
    return source


_VIEWS = {
    "subview": _subview, "reinterpret_cast": _reinterpret, "view": _memory_view,
    "collapse_shape": _collapse, "expand_shape": _expand, "cast": _same,
    "memory_space_cast": _same, "extract_strided_metadata": _base,
}  # fmt: skip


def _times(a, b):
    return None if a is None or b is None else a * b


def _plus(*values):
    return None if None in values else sum(values)


def _product(values):
    values = list(values)
    return None if None in values else math.prod(values)
