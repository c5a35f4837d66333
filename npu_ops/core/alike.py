"""Whether a call is like the latest one, which torch tells in one step.

Plans are found by a key of a call, and to make one in Python takes twice as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.autograd import forward_ad

from npu_ops.core import plans
from npu_ops.core.memo import Bounded

Tensors = Sequence[torch.Tensor | None]


class _Call(NamedTuple):
    """A call, and what was kept for it.

    given, missing: the places of tensors and of None. check: compares what is given.
    around: what else a call depends on.
    """

    given: list[int]
    missing: list[int]
    check: Callable[..., bool]
    around: tuple
    kept: object

    def is_like(self, tensors: Tensors) -> bool:
        for i in self.missing:
            if tensors[i] is not None:
                return False
        given = [tensors[i] for i in self.given] if self.missing else tensors
        for x in given:
            if getattr(x, "is_nested", True):  # torch ends the process where it has no strides
                return False
        return self.check(*given)


class Latest:
    """What was kept for the latest call of a function, for each of its settings.

    Calls are alike when torch would dispatch them alike, with the same modes and transforms, and
    their tensors have the same types, dtypes, shapes, strides and devices, and want gradients or
    not.
    """

    def __init__(self):
        self._calls: dict[tuple, _Call] = Bounded(16)
        self._met: dict[tuple, object] = Bounded(16)  # what was to be kept, by settings

    def find(self, tensors: Tensors, settings: tuple):
        """What was kept for a call like this; None where the latest was another."""
        if torch.compiler.is_compiling():
            return None
        try:
            call = self._calls.get(settings)
        except TypeError:  # what is no key is no setting either
            return None
        if call is None or call.around != _around() or not call.is_like(tensors):
            return None
        return call.kept

    def keep(self, tensors: Tensors, settings: tuple, kept: object) -> None:
        """Keep it for calls like this, once two in a row have been: to prepare that takes longer
        than to make a key."""
        if self._met.get(settings) is not kept:
            self._met[settings] = kept
            return
        given = [i for i, x in enumerate(tensors) if x is not None]
        missing = [i for i, x in enumerate(tensors) if x is None]
        check = _comparison([tensors[i] for i in given])
        if check is not None:
            self._calls[settings] = _Call(given, missing, check, _around(), kept)


def _around() -> tuple:
    """What a call depends on that is not to be seen in its tensors."""
    modes = torch._C._len_torch_dispatch_stack(), forward_ad._current_level
    return plans.around(), torch.is_grad_enabled(), modes


def _comparison(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """By the guards of torch.compile; None where this torch has them in another form."""
    sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
    try:
        guards = torch._C._dynamo.guards.TensorGuards
        return guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    except (AttributeError, TypeError, SystemError):
        return None
