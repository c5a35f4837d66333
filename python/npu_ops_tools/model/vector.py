"""Computes the times of HIVM operations on the vector unit.

An instruction processes repeats of 256 bytes. A new instruction starts every 255 repeats, and for
every row that is not contiguous with the previous one. The cycles are the vendor's (costs.csv).
"""

from __future__ import annotations

import math
import re

from npu_ops_tools.model.costs import MOST_REPEATS, REPEAT, Vector
from npu_ops_tools.model.ir import View

# dtype -> the dtype in costs.csv whose cycles it has
WIDTH = {"bf16": "f16", "i1": "i16", "i8": "i16", "ui8": "i16"}
TWO = ("vadd", "vsub", "vmul", "vdiv", "vmax", "vmin")


def cost(core, name: str, text: str, reads: list, writes: list) -> bool:
    """Occupy the core's vector pipe for an operation; return False if its cost is unknown."""
    sources = [view for view in reads if isinstance(view, View)]
    results = [view for view in writes if isinstance(view, View)]
    if not results:
        return False
    cycles = _cycles(core.costs, name, text, sources, results, len(reads))
    if cycles is None:
        return False
    largest = max((*sources, *results), key=lambda view: view.elements)
    shape = "x".join(map(str, largest.shape))
    core.occupy("V", f"{name} {shape} {largest.dtype}", cycles / core.costs.clock)
    return True


def _cycles(costs, name: str, text: str, sources: list, results: list, operands: int):
    views = (*sources, *results)
    if name == "vreduce":
        return _reduce(costs, text, sources[0])
    if name == "vcumsum":
        return _cumulative(costs, text, sources[0])
    if name == "varange":
        return _table(costs, "vadd", results[0].dtype, "", results[0], costs.range)
    if name == "vbrc" and sources and sources[0].elements != results[0].elements:
        return _spread(costs, sources[0], results[0])
    if name in ("vdeinterleave", "vinterleave"):
        return 2 * _table(costs, "vreduce_pattern", "f32", "", max(views, key=lambda v: v.elements))
    if name == "vtranspose":
        return _transpose(costs, results[0])
    widest = max(views, key=lambda view: (view.elements, view.bytes))
    kind = f" {_cast(sources, results)}" if name == "vcast" else ""
    if name in TWO and len(sources) < 2 <= operands:
        kind = " scalar"
    spread = 0.0
    if "broadcast" in text:
        spread = _broadcast(costs, text, sources, widest)
    source = sources[0] if name in ("vcmp", "vcast") and sources else widest
    return _table(costs, name, source.dtype, kind, widest, spread)


def _table(costs, name: str, dtype: str, kind: str, view: View, more: float = 0.0):
    """Return the cycles of an element-wise operation on `view`."""
    one = _instruction(costs, name, dtype, kind)
    if one is None or dtype == "i64":
        return None
    count, run = view.runs()
    repeats = max(1, math.ceil(run / REPEAT))
    if count > 1 and run < REPEAT and view.strides[-1] == 1:
        starts, repeats = 1, count  # rows are repeats of one instruction
    else:
        starts, repeats = count, repeats * count
    starts = max(starts, math.ceil(repeats / MOST_REPEATS))
    return more + starts * one.start + repeats * one.repeat


def _instruction(costs, name: str, dtype: str, kind: str) -> Vector | None:
    if name == "vcast":
        return costs.vector.get(f"vcast{kind}") or costs.vector["vcast other"]
    dtype = WIDTH.get(dtype, dtype)
    return costs.vector.get(f"{name} {dtype}{kind}")


def _cast(sources: list, results: list) -> str:
    return f"{sources[0].dtype} {results[0].dtype}"


def _broadcast(costs, text: str, sources: list, widest: View) -> float:
    """Return the extra cycles of an operand that is broadcast.

    A one-column operand is expanded: a block for each element. A one-row operand is read again with
    stride 0: one instruction for each repeat of a row, or one for each row, whichever are fewer.
    """
    axes = [int(i) for i in re.search(r"broadcast = \[([\d, ]*)\]", text)[1].split(",")]
    rows = widest.elements // widest.shape[-1] if widest.shape else 1
    smallest = min(sources, key=lambda view: view.elements)
    block = costs.vector["broadcast f32"]
    if len(widest.shape) - 1 in axes:
        return block.start + smallest.elements / 8
    repeats = math.ceil(widest.shape[-1] * widest.bytes / widest.elements / REPEAT)
    return (min(rows, repeats) - 1) * costs.vector["copy f32"].start


def _spread(costs, source: View, result: View):
    """Return the cycles to repeat a tensor along an axis: copies, plus a block per 8 elements."""
    block = costs.vector["broadcast f32"]
    copies = _table(costs, "copy", result.dtype, "", result)
    if copies is None:
        return None
    return copies + block.start + source.elements / 8


def _transpose(costs, result: View):
    one = _instruction(costs, "vtranspose", result.dtype, "")
    if one is None:
        return None
    return one.start + math.ceil(result.bytes / (2 * REPEAT)) * one.start


def _reduce(costs, text: str, source: View):
    """Return the cycles of a reduction.

    It halves rows until they are one repeat, then reduces each row within its repeat. Along another
    axis it halves to the end.
    """
    axes = [int(i) for i in re.search(r"reduce_dims = \[([\d, ]*)\]", text)[1].split(",")]
    kind = "vmax" if re.search(r"<(max|min)", text) else "vadd"
    halve = _instruction(costs, kind, source.dtype, "")
    within = _instruction(costs, "vreduce_row", source.dtype, "")
    if halve is None or within is None:
        return None
    reduced = max(1, math.prod(source.shape[i] for i in axes))
    rows = source.elements / reduced
    if len(source.shape) - 1 not in axes:
        steps = math.ceil(math.log2(max(2, reduced)))
        return steps * halve.start + source.bytes / REPEAT * halve.repeat
    steps = math.ceil(math.log2(max(1.0, source.bytes / rows / REPEAT)))
    halving = steps * halve.start + source.bytes / REPEAT * halve.repeat * (steps > 0)
    return halving + within.start + rows * within.repeat


def _cumulative(costs, text: str, source: View):
    """Return the cycles of a cumulative sum: one addition for each element along the axis."""
    axis = int(re.search(r"cum_dims = \[(\d+)\]", text)[1])
    one = _instruction(costs, "vadd", source.dtype, "")
    if one is None:
        return None
    length = source.shape[axis]
    return length * (one.start + math.ceil(source.bytes / length / REPEAT) * one.repeat)
