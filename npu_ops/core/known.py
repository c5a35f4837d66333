"""Calls of a public function like one before: they are not checked and not prepared anew.

That is as much of a small call as its kernel. A call is like another when its tensors have the same
dtypes, shapes, strides and devices, and everything else is equal.
"""

from __future__ import annotations

from collections.abc import Callable

from npu_ops.core import library, plans
from npu_ops.core.memo import Bounded
from npu_ops.core.operator import Operator
from npu_ops.core.recipes import Again, Calls
from npu_ops.core.registry import explains


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
        # What computes a call that is known; None where nothing is to be known.
        self._known: dict[tuple, Again | None] = Bounded(64)
        self._calls = Calls()
        explains(name, operator, prepare)

    def __call__(self, *tensors, **settings):
        """Compute the function: its tensors in their places, the rest by name."""
        values = tuple(settings.values())
        found = self._calls.again(tensors, values)
        if found is not None:
            return found
        key = key_of(tensors, values)
        again = self._known.get(key)
        if again is not None:
            self._calls.keep(tensors, values, again)
            return again(tensors)
        inputs = self._prepare(*tensors, **settings)
        result = self._operator(*inputs)
        self._keep(key, tensors, inputs)
        return result

    def _keep(self, key, tensors, inputs) -> None:
        """Remember a call for which there is a plan by now, also that its inputs are not known."""
        if key is None or key in self._known:
            return
        plan = self._operator.plan_of(inputs)
        if plan is not None:
            watched, _ = key
            inputs_of = plans.plan(tensors, (), inputs, plan.chosen)
            self._known[key] = self._again(inputs_of, plan, watched)

    def _again(
        self, inputs_of: plans.Plan | None, plan: plans.Plan, watched: str | None
    ) -> Again | None:
        """None also where autograd would not see how the inputs come from the arguments."""
        if inputs_of is None or (watched and not inputs_of.same):
            return None
        operator = self._operator
        run = operator.again(plan, watched)
        return Again(run, operator.name, plan, watched, inputs_of=inputs_of)


def key_of(tensors: tuple, settings: tuple) -> tuple | None:
    """Who watches a call, and what it is known by; None where it is to be looked at each time."""
    watched = library.watched(tensors)
    if watched is library.BY_MORE:
        return None
    try:
        hash(settings)
        key = plans.key_of(tensors, settings)
    except (TypeError, RuntimeError):
        # What is no key is no setting either, and a sparse or nested tensor has no strides: to say
        # so is the checks' business.
        return None
    return key and (watched, key)
