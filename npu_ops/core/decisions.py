"""Cache of dispatch decisions: calls of an operator with an equal key reuse one decision.

A decision is how outputs are allocated, how arguments are laid out, and which implementation runs.
It depends on the key alone: dtypes, shapes, strides and devices of all tensors, all other
arguments, whether there is a process group, and the epoch. Checks of tensor values, e.g. of
indices, run in every call. The cache holds no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from npu_ops.core import epoch
from npu_ops.core.collective import in_a_group

MOST = 256  # keys per operator; a full cache is cleared, because so many shapes rarely repeat


class Output(NamedTuple):
    """How to allocate an output."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def new(self) -> torch.Tensor:
        size, stride, dtype, device = self
        return torch.empty_strided(size, stride, dtype=dtype, device=device)


class View(NamedTuple):
    """How to make one tensor argument of the implementation from the call's inputs and outputs.

    place: index of the argument. source: index of the input or output that it comes from.
    size, stride: of the view; None if the argument is the source itself.
    """

    place: int
    source: int
    size: torch.Size | None = None
    stride: tuple[int, ...] | None = None


class Decision:
    """The decision for one call.

    Args:
        implementation: the implementation that runs.
        outputs: the call's outputs; None for those that the caller does not want.
        arguments: the implementation's arguments; tensors among them are not kept.
        views: how to make its tensor arguments in a later call.
    """

    def __init__(self, implementation, outputs: Sequence, arguments: Sequence, views: list[View]):
        self.implementation = implementation
        self._outputs = [
            None if x is None else Output(x.shape, x.stride(), x.dtype, x.device) for x in outputs
        ]
        self._arguments = [None if isinstance(x, torch.Tensor) else x for x in arguments]
        self._same = [(view.place, view.source) for view in views if view.size is None]
        self._views = [view for view in views if view.size is not None]

    def outputs(self) -> list[torch.Tensor | None]:
        """Allocate the outputs, uninitialised."""
        return [None if output is None else output.new() for output in self._outputs]

    def arguments(self, tensors: Sequence[torch.Tensor | None]) -> tuple:
        """Return the implementation's arguments.

        tensors: the call's input tensors, then its outputs.
        """
        arguments = self._arguments.copy()
        for place, source in self._same:
            arguments[place] = tensors[source]
        for place, source, size, stride in self._views:
            arguments[place] = tensors[source].as_strided(size, stride)
        return tuple(arguments)


class Decisions:
    """The decisions of one operator.

    tensors: number of tensor arguments, which come first in its inputs.
    """

    def __init__(self, tensors: int):
        self._tensors = tensors
        self._found: dict[tuple, Decision | None] = {}

    def key(self, inputs: Sequence) -> tuple:
        known = [epoch.number(), in_a_group()]
        for x in inputs[: self._tensors]:
            known += (None,) if x is None else (x.shape, x.stride(), x.dtype, x.device)
        for x in inputs[self._tensors :]:
            known.append(tuple(x) if isinstance(x, list) else x)
        return tuple(known)

    def find(self, key: tuple) -> Decision | None:
        return self._found.get(key)

    def keep(self, key: tuple, implementation, inputs, outputs, arguments) -> None:
        """Store the decision under `key`.

        If a tensor argument is not a view of exactly one input or output, e.g. a copy, store None:
        calls with this key are then decided anew each time.
        """
        if key in self._found:
            return
        if len(self._found) >= MOST:
            self._found.clear()
        sources = [*inputs[: self._tensors], *outputs]
        views = _views(arguments, sources)
        decision = None if views is None else Decision(implementation, outputs, arguments, views)
        self._found[key] = decision


def _views(arguments: Sequence, sources: Sequence) -> list[View] | None:
    """Return how to make each tensor argument from the sources.

    None if an argument is not a view of exactly one source.
    """
    views = []
    for place, x in enumerate(arguments):
        if isinstance(x, torch.Tensor):
            same = [i for i, source in enumerate(sources) if source is x]
            alike = same or [i for i, y in enumerate(sources) if y is not None and _begins(x, y)]
            if len(alike) != 1:
                return None
            views.append(View(place, *alike, *(() if same else (x.shape, x.stride()))))
        elif isinstance(x, tuple) and any(isinstance(y, torch.Tensor) for y in x):
            return None
    return views


def _begins(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether both tensors begin at the same address and have the same dtype."""
    return x.data_ptr() == y.data_ptr() and x.dtype == y.dtype and bool(x.data_ptr())
