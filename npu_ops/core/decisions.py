"""What an operator decided for a call, kept for calls with an equal key.

A decision is how outputs are allocated, how arguments are laid out, and which implementation runs.
It is assumed to depend on the key alone: dtypes, shapes, strides and devices of all tensors, all
other arguments, whether there is a process group, and the epoch. What depends on a tensor's values,
as checks of indices do, is done in every call. Nothing here holds a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from npu_ops.core import epoch
from npu_ops.core.collective import in_a_group

MOST = 256  # keys of one operator; then all are dropped, for shapes come few or ever new


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
    """An argument that is a tensor: one of inputs and outputs by number, as it is or as a view."""

    place: int
    source: int
    size: torch.Size | None = None
    stride: tuple[int, ...] | None = None


class Decision:
    """What was decided for a call.

    Args:
        implementation: the one that runs.
        outputs: the call's, None for those that are not wanted.
        arguments: what the implementation takes.
        views: its tensors, by where they come from.
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
        """Return the implementation's arguments. tensors: the call's inputs, then its outputs."""
        arguments = self._arguments.copy()
        for place, source in self._same:
            arguments[place] = tensors[source]
        for place, source, size, stride in self._views:
            arguments[place] = tensors[source].as_strided(size, stride)
        return tuple(arguments)


class Decisions:
    """The decisions of one operator. `tensors`: how many tensors its inputs begin with."""

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
        """Keep a decision, or that there is none because an argument was copied."""
        if key in self._found:
            return
        if len(self._found) >= MOST:
            self._found.clear()
        sources = [*inputs[: self._tensors], *outputs]
        views = _views(arguments, sources)
        decision = None if views is None else Decision(implementation, outputs, arguments, views)
        self._found[key] = decision


def _views(arguments: Sequence, sources: Sequence) -> list[View] | None:
    """Where each tensor of the arguments comes from; None if one is no view of one source."""
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
    """Whether both begin with the same element."""
    return x.data_ptr() == y.data_ptr() and x.dtype == y.dtype and bool(x.data_ptr())
