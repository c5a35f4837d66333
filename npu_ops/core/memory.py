"""Which memory tensors have: whether two of them, or two elements of one, share a byte."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

# (stride, least, most): what a factor from least to most times the stride adds to an address.
Term = tuple[int, int, int]
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def apart(
    written: dict[str, torch.Tensor | None],
    read: dict[str, torch.Tensor | None],
    elementwise: bool = False,
) -> None:
    """Raise ValueError if a tensor that is `written` shares memory with another. None is none.

    elementwise: an element is read before it is written, so one of `read` may be a written tensor
        as a whole.
    """
    changed = [(name, x, *_place(x)) for name, x in written.items() if x is not None]
    others = [(name, x, *_place(x)) for name, x in read.items() if x is not None]
    for i, (name, x, base, begin, end) in enumerate(changed):
        for other, y, other_base, at, other_end in changed[i + 1 :] + others:
            if at >= end or other_end <= begin or base != other_base:
                continue
            same = elementwise and other in read and at == begin and _laid_out_alike(x, y)
            if not same and begin < end and at < other_end and _meet(x, y, at - begin):
                raise ValueError(f"{name}: got memory that {other} has too, needs its own")


def overlaps_itself(x: torch.Tensor) -> bool:
    """Whether two elements of `x` share memory."""
    if x.is_contiguous():
        return False
    size = x.element_size()
    terms = sorted(
        ((s * size, 0, n - 1) for n, s in zip(x.shape, x.stride(), strict=True) if n > 1),
        reverse=True,
    )
    below = size  # bytes that the inner dimensions span
    for stride, _, most in reversed(terms):
        if stride < below:
            break
        below += stride * most
    else:
        return False
    if not terms[-1][0]:
        return True
    # Two elements differ first in some dimension, where the second is further on.
    for i, (stride, _, most) in enumerate(terms):
        inner = [(s, -n, n) for s, _, n in terms[i + 1 :]]
        if _reaches(0, [(stride, 1, most), *inner], 1 - size, size - 1):
            return True
    return False


def _place(x) -> tuple[int, int, int]:
    """Return where `x` lies: an id of its memory, its first byte, and the byte after its last."""
    if type(x) in _PLAIN and not x.is_meta:
        base, begin = 0, x.data_ptr()
        if x.is_contiguous():
            return base, begin, begin + x.nbytes
    else:
        base, begin = x.untyped_storage()._cdata, _number(x.storage_offset()) * x.element_size()
    shape, strides = _layout(x)
    last = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    return base, begin, begin + (last + 1) * x.element_size() if all(shape) else begin


def _layout(x) -> tuple[list[int], list[int]]:
    return [_number(n) for n in x.shape], [_number(n) for n in x.stride()]


def _number(n) -> int:
    """Return a size as an int, without a guard: of a symbolic size the compiler's hint, or 0."""
    return n if isinstance(n, int) else n.node.hint or 0


def _laid_out_alike(x, y) -> bool:
    return _layout(x) == _layout(y) and x.dtype == y.dtype


def _meet(x, y, distance: int) -> bool:
    """Whether an element of `y`, which starts `distance` bytes after `x`, shares a byte with x's.

    Dimensions of one stride, as heads of a fused projection have, count as one.
    """
    spans = {}
    for tensor, sign in ((x, -1), (y, 1)):
        for n, stride in zip(*_layout(tensor), strict=True):
            if n > 1 and stride:
                stride *= tensor.element_size()
                least, most = spans.get(stride, (0, 0))
                spans[stride] = least + min(0, sign * (n - 1)), most + max(0, sign * (n - 1))
    terms = sorted(((stride, *span) for stride, span in spans.items()), reverse=True)
    return _reaches(distance, terms, 1 - y.element_size(), x.element_size() - 1)


def _reaches(value: int, terms: Sequence[Term], low: int, high: int) -> bool:
    """Whether `value` and a multiple of each stride add up to low..high; large strides first."""
    if not terms:
        return low <= value <= high
    common = math.gcd(*(stride for stride, _, _ in terms))
    if (high - value) // common * common + value < low:  # the nearest that strides can make
        return False
    (stride, least, most), *inner = terms
    inner_low = value + sum(s * n for s, n, _ in inner)
    inner_high = value + sum(s * n for s, _, n in inner)
    begin = max(least, -((inner_high - low) // stride))
    end = min(most, (high - inner_low) // stride)
    return any(_reaches(value + stride * n, inner, low, high) for n in range(begin, end + 1))
