"""Views of tensors as rows, for kernels that work along the last dimension."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch


def as_rows(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """View tensors of equal shape `[..., D]` as `[outer, inner, D]`, last dimension contiguous.

    If the leading dimensions do not fold into two, inputs are copied. A slice of a fused projection
    folds. Outputs must fold: writes to a copy would be lost.

    Raises:
        ValueError: an output does not fold.
    """
    tensors = [*inputs, *outputs]
    if all(tensor.is_contiguous() for tensor in tensors):
        rows = math.prod(tensors[0].shape[:-1])  # view(-1, ..) is ambiguous if D is 0
        return [tensor.view(rows, 1, tensor.shape[-1]) for tensor in tensors]
    folded = _fold(tensors)
    if folded is None:
        tensors = [*(tensor.contiguous() for tensor in inputs), *outputs]
        folded = _fold(tensors)
    if folded is None:
        raise _no_view(outputs)
    (inner, inner_strides), (outer, outer_strides) = folded
    shape = (outer, inner, tensors[0].shape[-1])
    return [
        tensor.as_strided(shape, (*strides, 1))
        for tensor, *strides in zip(tensors, outer_strides, inner_strides, strict=True)
    ]


def lay_out_rows(inputs: Sequence[str], outputs: Sequence[str], groups: str | None = None):
    """Return a `lay_out` for an Operator along the last dimension: `as_rows` of the named tensors.

    All these tensors have the same shape.

    groups: name of a parameter `[D]` or `[groups, D / groups]`. It is made contiguous, as is its
    gradient, and passed as `[1, D]` or `[groups, D / groups]`. With groups, each group is a row of
    its own: tensors become `[rows, groups, D / groups]`.
    """
    names = (*inputs, *outputs)

    def lay_out(arguments):
        laid = list(arguments)
        places = _places(type(arguments), names)
        tensors = [laid[i] for i in places]
        given, written = tensors[: len(inputs)], tensors[len(inputs) :]
        if groups is None:
            rows = as_rows(given, written)
        else:
            pieces = [n for n in (groups, f"grad_{groups}") if n in arguments._fields]
            for place in _places(type(arguments), tuple(pieces)):
                laid[place] = torch.atleast_2d(laid[place].contiguous())
            rows = _grouped_rows(given, written, laid[place].shape)
        for i, tensor in zip(places, rows, strict=True):
            laid[i] = tensor
        return laid

    return lay_out


@functools.cache
def _places(arguments: type, names: tuple[str, ...]) -> list[int]:
    """Return the indices of these fields in a NamedTuple type."""
    return [arguments._fields.index(name) for name in names]


def _grouped_rows(inputs, outputs, groups):
    if groups[0] == 1:
        return as_rows(inputs, outputs)
    matrices = [*map(as_matrix, inputs), *map(output_matrix, outputs)]
    return [matrix.unflatten(1, groups) for matrix in matrices]


def rows_up_to(name: str, widest: int):
    """Return a `why_not` that rejects rows of the tensor `name` longer than `widest` elements."""

    def why_not(arguments) -> str | None:
        width = getattr(arguments, name).shape[-1]
        if width > widest:
            return f"rows of {width} elements are longer than {widest}"
        return None

    return why_not


def as_matrix(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return an input `[..., D]` as `[rows, D]`, last dimension contiguous; None for None.

    It is a view if the leading dimensions fold into one, as in a contiguous tensor; else a copy.
    """
    if tensor is None:
        return None
    matrix = (
        tensor
        if tensor.dim() == 2
        else tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])
    )
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def output_matrix(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return an output `[..., D]` as a view `[rows, D]`; None for None.

    Raises:
        ValueError: there is no such view; writes to a copy would be lost.
    """
    matrix = as_matrix(tensor)
    if tensor is not None and _storage(matrix) != _storage(tensor):
        raise _no_view([tensor])
    return matrix


def in_one_piece(x: torch.Tensor) -> torch.Tensor:
    """Return an input with a contiguous last dimension, as kernels need; copies it if necessary.

    Gradients often need the copy. So does a last dimension expanded from one element, with stride
    0.
    """
    return x if x.stride(-1) == 1 else x.contiguous()


def like_one_piece(x: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised tensor with the layout of `in_one_piece(x)`."""
    if x.stride(-1) == 1:
        return torch.empty_like(x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _storage(tensor) -> int:
    return tensor.untyped_storage()._cdata


def _no_view(outputs) -> ValueError:
    strides = ", ".join(str(list(tensor.stride())) for tensor in outputs)
    return ValueError(f"output: got strides {strides}, needs strides that allow a view of its rows")


def _fold(tensors):
    """Fold the leading dimensions into two; return None if that is not possible.

    Returns:
        (size, strides of each tensor) of the inner and of the outer dimension.
    """
    shape = tensors[0].shape
    if any(tensor.stride(-1) != 1 for tensor in tensors) and shape[-1] > 1:
        return None
    levels = []
    for dim in reversed(range(len(shape) - 1)):
        strides = [tensor.stride(dim) for tensor in tensors]
        if levels and strides == [levels[-1][0] * stride for stride in levels[-1][1]]:
            levels[-1] = levels[-1][0] * shape[dim], levels[-1][1]
        elif shape[dim] != 1:
            levels.append((shape[dim], strides))
    nothing = 1, [0] * len(tensors)
    # A single level becomes the outer one. `launch_rows` chooses BI, a constexpr, by the inner
    # size, and would otherwise compile the kernel again for another number of rows.
    if len(levels) < 2:
        levels = [nothing, *levels]
    return (*levels, nothing)[:2] if len(levels) <= 2 else None
