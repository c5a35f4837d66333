"""Overlap checks: whether two tensors, or two elements of one tensor, share a byte of memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

# (stride, least, most): a dimension moves an address by `stride` bytes times a factor, which is any
# integer in least..most.
Term = tuple[int, int, int]
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def apart(
    written: dict[str, torch.Tensor | None],
    read: dict[str, torch.Tensor | None],
    elementwise: bool = False,
) -> None:
    """Raise ValueError if a tensor in `written` shares memory with any other tensor.

    None values are skipped.

    elementwise: True if the kernel reads each element before it overwrites it. A tensor in `read`
    may then have the same memory and layout as a written one.
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
    """Return whether two elements of `x` share memory."""
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
    # The indices of two elements first differ in one dimension, where the second element has the
    # larger index. Test each dimension as that first one.
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
    """Return a size as an int; for a symbolic size its hint or 0, so that no guard is added."""
    return n if isinstance(n, int) else n.node.hint or 0


def _laid_out_alike(x, y) -> bool:
    return _layout(x) == _layout(y) and x.dtype == y.dtype


def _meet(x, y, distance: int) -> bool:
    """Return whether `y`, which starts `distance` bytes after `x`, shares a byte with it.

    Dimensions with equal strides, as heads of a fused projection have, are merged.
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
    """Return whether `value` plus a multiple of each stride can lie in low..high.

    terms: allowed multiples of each stride, sorted by decreasing stride.
    """
    if not terms:
        return low <= value <= high
    common = math.gcd(*(stride for stride, _, _ in terms))
    # The sum differs from `value` by a multiple of the strides' greatest common divisor. The
    # largest such sum up to `high` must be at least `low`.
    if (high - value) // common * common + value < low:
        return False
    (stride, least, most), *inner = terms
    inner_low = value + sum(s * n for s, n, _ in inner)
    inner_high = value + sum(s * n for s, _, n in inner)
    begin = max(least, -((inner_high - low) // stride))
    end = min(most, (high - inner_low) // stride)
    return any(_reaches(value + stride * n, inner, low, high) for n in range(begin, end + 1))
