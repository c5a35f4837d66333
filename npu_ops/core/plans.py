"""What an operator did for a call, to do again for calls like it.

A call is like another when its arguments have the same dtypes, shapes, strides and settings. Then
its outputs are made, its arguments laid out and its implementation chosen as before, and nothing of
that has to be found out. That is most of what a small call costs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from npu_ops.core import library
from npu_ops.core.collective import in_a_group
from npu_ops.core.memo import Bounded

if TYPE_CHECKING:
    from npu_ops.core.recipes import Again, Recipe

# Of one operator; a model makes calls of few shapes, or of ever new ones, which no plan serves.
_MOST = 64
# Counts what implementations are chosen by, besides a call: switches, assumed devices, tables of
# preferences. Plans of before are not found again.
_epoch = 0
_NEW, _SEEN = "new", False  # in the place of a plan: never or once seen
# They are asked for each call: what they have against one may be where its memory begins.
_OTHERS_KERNELS = ("aclnn", "fla_npu")


class Made(NamedTuple):
    """How an output is made: like an input where that has its layout, which takes half the time."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    like: int | None

    def new(self, inputs: Sequence[torch.Tensor | None]) -> torch.Tensor:
        if self.like is None:
            size, stride, dtype, device, _ = self
            return torch.empty_strided(size, stride, dtype=dtype, device=device)
        like = inputs[self.like]
        if like.dtype is self.dtype:
            return torch.empty_like(like)
        return torch.empty_like(like, dtype=self.dtype)


def _made(x: torch.Tensor, inputs: Sequence[torch.Tensor | None]) -> Made:
    like = next((i for i, y in enumerate(inputs) if y is not None and _makes_like(y, x)), None)
    return Made(x.shape, x.stride(), x.dtype, x.device, like)


def _makes_like(y: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether `torch.empty_like(y)` has x's layout."""
    same = y.shape == x.shape and y.device == x.device
    return same and torch.empty_like(y, device="meta").stride() == x.stride()


class View(NamedTuple):
    """What an implementation takes in a place: a tensor as it is, or seen in another shape."""

    place: int
    tensor: int
    size: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None


def forget() -> None:
    """Make no use of plans of before: something that implementations are chosen by has changed."""
    global _epoch
    _epoch += 1
    loaded = sys.modules.get(library.KNOWN)
    if loaded is not None:
        loaded.forget()


def around() -> tuple:
    """What an implementation is chosen by, besides a call: something else after each `forget`."""
    return _epoch, in_a_group()


def key_of(
    tensors: Sequence[torch.Tensor | None], settings: tuple, seeds: Container[int] = ()
) -> tuple | None:
    """What calls that are alike have in common: of the tensors all but their contents.

    None where there is no plan: index values decide what a call does, too. But seeds do not, which
    are integers in these places.
    """
    known: list = [around(), settings]
    for i, x in enumerate(tensors):
        if x is None:
            known.append(None)
        elif x.is_floating_point() or i in seeds:
            known.append((x.shape, x.stride(), x.dtype, x.device))
        else:
            return None
    return tuple(known)


class Plan:
    """How to do again what was done for a call.

    Args:
        inputs, outputs: the tensors of that call.
        laid: what the implementation took.
        chosen: the implementation.
        views: how the tensors among `laid` come from the call's inputs and outputs.
    """

    def __init__(
        self, inputs: Sequence, outputs: Sequence, laid: Sequence, chosen, views: Sequence[View]
    ):
        self.chosen, self.takes = chosen, len(inputs)
        self.known: dict[str | None, Again] = {}  # what computes it, by who watches
        self.ways: dict[str | None, Callable] = {}  # of doing it again, by who watches
        self.recorded: tuple | None = None  # what the gradient keeps besides tensors
        self._makes = [None if x is None else _made(x, inputs) for x in outputs]
        self._constant = [None if isinstance(x, torch.Tensor) else x for x in laid]
        self._same = [(view.place, view.tensor) for view in views if view.size is None]
        self._views = [view for view in views if view.size is not None]

    @property
    def in_cpp(self) -> bool:
        """Whether the implementation is an operator of torch, with no Python in it."""
        return isinstance(self.chosen.launcher, torch._ops.OpOverload)

    @property
    def same(self) -> bool:
        """Whether all tensors are taken as they are."""
        return not self._views

    def unfold(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take tensors as they are, where each view but folds the leading dimensions of one."""
        if all(_folds(tensors[view.tensor], view) for view in self._views):
            self._same += [(view.place, view.tensor) for view in self._views]
            self._views = []

    def outputs(self, inputs: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """New ones, uninitialised."""
        return [None if made is None else made.new(inputs) for made in self._makes]

    def laid(self, tensors: Sequence[torch.Tensor | None]) -> tuple:
        """What the implementation takes of a call's inputs and outputs."""
        laid = self._constant.copy()
        for place, tensor in self._same:
            laid[place] = tensors[tensor]
        for place, tensor, size, stride in self._views:
            laid[place] = tensors[tensor].as_strided(size, stride)
        return tuple(laid)

    def values(self, recipe: Recipe, places: Sequence[int | None]) -> dict[int, int]:
        """Which values the implementation takes, by their places among what it takes.

        places: of the inputs and outputs among the recipe's values.
        """
        views = {v.place: recipe.view(places[v.tensor], v.size, v.stride) for v in self._views}
        return {place: places[tensor] for place, tensor in self._same} | views

    def write(self, recipe: Recipe, places: Sequence[int | None]) -> list[int | None]:
        """Write into a recipe what is done for inputs in these places; where the outputs are."""
        outputs = [None if made is None else recipe.empty(*made[:-1]) for made in self._makes]
        values = self.values(recipe, [*places, *outputs])
        recipe.call(self.chosen.launcher, *self._constant, values=values)
        return outputs


class Plans:
    """The plans of an operator.

    Args:
        tensors: how many tensors its inputs begin with.
        seeds: the places of random seeds among them.
        lists: whether there are lists among the others.
        folds: whether native CPU kernels fold the leading dimensions of contiguous tensors.
        directly: of what an implementation took, and it, the same of what does it with less Python.
    """

    def __init__(
        self,
        tensors: int,
        seeds: Container[int],
        lists: bool,
        folds: bool = False,
        directly: Callable[..., tuple] = lambda laid, chosen: (laid, chosen),
    ):
        self._tensors, self._seeds, self._lists, self._folds = tensors, seeds, lists, folds
        self._directly = directly
        self._plans: dict[tuple, Plan | None] = Bounded(_MOST)

    def parted(self, inputs: tuple) -> tuple[tuple, tuple]:
        """The tensors among an operator's inputs, and the rest, as it is compared."""
        settings = inputs[self._tensors :]
        if self._lists:
            settings = tuple([tuple(x) if isinstance(x, list) else x for x in settings])
        return inputs[: self._tensors], settings

    def key_of(self, inputs: tuple) -> tuple | None:
        """What a plan is found by, see `key_of`."""
        return key_of(*self.parted(inputs), self._seeds)

    def find(self, key: tuple | None) -> Plan | None:
        """The plan for such a call, where there is one."""
        return (self._plans.get(key) or None) if key is not None else None

    def keep(self, key, inputs, outputs, laid, chosen) -> None:
        """Make a plan of a call of which there have been two: many shapes come once."""
        if key is None:
            return
        known = self._plans.get(key, _NEW)  # asked once: another thread may clear them
        if known is _NEW:
            self._plans[key] = _SEEN
        elif known is _SEEN:
            tensors = inputs[: self._tensors]
            found = plan(tensors, outputs, *self._directly(laid, chosen))
            if found and self._folds and chosen.name == "cpu":
                found.unfold([*tensors, *outputs])
            self._plans[key] = found


def plan(inputs: Sequence, outputs: Sequence, laid: Sequence, chosen) -> Plan | None:
    """How to make such outputs, and to lay out tensors like the inputs and them.

    None where something was copied for the implementation, or its choice may be another."""
    if chosen.name in _OTHERS_KERNELS:
        return None
    views, sources = [], [*inputs, *outputs]
    for place, x in enumerate(laid):
        if isinstance(x, torch.Tensor):
            views.append(_view(place, x, sources))
        elif isinstance(x, tuple) and any(isinstance(y, torch.Tensor) for y in x):
            return None
    return None if None in views else Plan(inputs, outputs, laid, chosen, views)


def _view(place: int, x: torch.Tensor, sources: Sequence) -> View | None:
    """None unless it comes from one of the sources, without doubt from which."""
    same = [i for i, source in enumerate(sources) if source is x]
    if same:
        return View(place, *same) if len(same) == 1 else None
    alike = [i for i, y in enumerate(sources) if y is not None and _begin_alike(x, y)]
    return View(place, *alike, x.shape, x.stride()) if len(alike) == 1 else None


def _folds(x: torch.Tensor, view: View) -> bool:
    same_rows = x.dim() > 0 and x.shape[-1] == view.size[-1] and view.stride[-1] == 1
    return same_rows and x.is_contiguous() and math.prod(view.size) == x.numel()


def _begin_alike(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.data_ptr() == y.data_ptr() and x.dtype == y.dtype and bool(x.data_ptr())
