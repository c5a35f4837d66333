"""Calls of a public function like one before: they are not checked and not prepared anew.

That is as much of a small call as its kernel. A call is like another when its tensors have the same
dtypes, shapes, strides and devices, and everything else is equal.
"""

from __future__ import annotations

from collections.abc import Callable

from npu_ops.core import library, plans
from npu_ops.core.memo import Bounded
from npu_ops.core.operator import Operator
from npu_ops.core.registry import explains

_NOTHING = None, None


class Known:
    """A public function by its operator.

    Args:
        name: the function's, for `npu_ops.explain`.
        operator: computes it.
        prepare: checks the public arguments and returns the operator's inputs. What it checks, and
            how the inputs come from the arguments, depends on nothing that two calls that are alike
            differ in.
    """

    def __init__(self, name: str, operator: Operator, prepare: Callable[..., tuple]):
        self._operator, self._prepare = operator, prepare
        self._calls: dict[tuple, tuple[plans.Plan, plans.Plan]] = Bounded(64)
        self._makes_views = False  # of arguments, through which autograd has to see
        explains(name, operator, prepare)

    def __call__(self, *tensors, **settings):
        """Compute the function: its tensors in their places, the rest by name."""
        watched = library.watched(tensors)
        if watched == library.BY_MORE or (watched and self._makes_views):
            return self._operator(*self._prepare(*tensors, **settings))
        key, (inputs_of, plan) = self._found(tensors, settings)
        if plan is not None and watched is None:
            return self._operator.run_again(inputs_of.laid(tensors), plan)
        if plan is not None and not self._makes_views:
            return self._operator.record_again(inputs_of.laid(tensors), plan)
        inputs = self._prepare(*tensors, **settings)
        result = self._operator(*inputs)
        self._keep(key, tensors, inputs)
        return result

    def _found(self, tensors, settings):
        try:
            key = plans.key_of(tensors, tuple(settings.values()))
            return key, self._calls.get(key, _NOTHING)
        except (TypeError, RuntimeError):
            # What is no key is no setting either, and a sparse or nested tensor has no strides: to
            # say so is the checks' business.
            return None, _NOTHING

    def _keep(self, key, tensors, inputs) -> None:
        """Remember a call for which there is a plan by now, also that its inputs are not known."""
        if key is None or key in self._calls:
            return
        plan = self._operator.plan_of(inputs)
        if plan is None:
            return
        inputs_of = plans.plan(tensors, (), inputs, plan.chosen)
        self._calls[key] = (inputs_of, plan) if inputs_of else _NOTHING
        self._makes_views |= bool(inputs_of) and not inputs_of.same
