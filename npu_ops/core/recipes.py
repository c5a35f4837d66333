"""Calls like one before, in C++: what a plan does, without Python (`csrc/known`).

Only with the torch that npu-ops was built with: gradients in C++ have no stable interface.
"""

from __future__ import annotations

import types
from collections.abc import Callable

import torch

from npu_ops.core import library, plans, registry
from npu_ops.core.alike import Latest
from npu_ops.core.collective import in_a_group


class Recipe:
    """Steps that make values of values. A value has a place: inputs first, then what steps make."""

    def __init__(self, inputs: int):
        self.steps = library.known().Recipe(inputs)

    def empty(self, size, stride, dtype: torch.dtype, device: torch.device) -> int:
        """The place of a new tensor."""
        place = self.steps.empty(size, stride, dtype, device)
        if library.poison_outputs:
            self.call(torch.ops.aten.fill_.Scalar, None, float("nan"), values={0: place})
        return place

    def view(self, place: int, size, stride) -> int:
        """The place of a view of a value."""
        return self.steps.view(place, size, stride)

    def cast(self, place: int, dtype: torch.dtype) -> int:
        """The place of a value in another dtype."""
        to = torch.ops.aten.to.dtype
        return self.call(to, None, dtype, False, False, None, values={0: place})

    def call(self, operator: torch._ops.OpOverload, *arguments, values: dict[int, int]) -> int:
        """Call an operator of torch; where its first result is.

        values: the places of values, by the places of the arguments that they are.
        """
        schema = operator._schema
        return self.steps.call(schema.name, schema.overload_name, arguments, values)


def nothing_like(x: torch.Tensor) -> torch.Tensor:
    """What an operator of torch returns for an output that is not there."""
    return torch.empty(0, dtype=x.dtype, device=x.device)


class Again:
    """Computes calls of an operator like one before, from the tensors that are given.

    Args:
        run: does so in Python, from the operator's inputs.
        name, plan, by: of the operator, what it does, and whether autograd watches.
        settings: the operator's inputs behind its tensors, which are what is given; or
        inputs_of: how all its inputs come from the tensors.
    """

    def __init__(
        self,
        run: Callable,
        name: str,
        plan: plans.Plan,
        by: str | None,
        settings: tuple = (),
        inputs_of: plans.Plan | None = None,
    ):
        self._run, self._name, self._plan, self._by = run, name, plan, by
        self._settings, self._inputs_of = settings, inputs_of
        self._made: list = []

    def __call__(self, tensors: tuple):
        return self._run(*self._inputs(tensors))

    def _inputs(self, tensors: tuple) -> tuple:
        if self._inputs_of is None:
            return (*tensors, *self._settings)
        return self._inputs_of.laid(tensors)

    def native(self, tensors: tuple):
        """The same in C++, for calls like this one; None where Python has a part in it."""
        if not self._made:
            self._made.append(self._written(tensors) if self._can_be_native() else None)
        return self._made[0]

    def _can_be_native(self) -> bool:
        in_cpp = self._plan.in_cpp and library.known() is not None
        return in_cpp and not registry.launches_are_watched()

    def _written(self, tensors: tuple):
        recipe, given = Recipe(len(tensors)), range(len(tensors))
        if self._inputs_of is None:
            places = [None if tensors[i] is None else i for i in given]
        else:
            values = self._inputs_of.values(recipe, given)
            places = [values.get(i) for i in range(self._plan.takes)]
        inputs, gradient = self._inputs(tensors), None
        outputs = self._plan.write(recipe, places)
        if self._by is not None:
            gradient = _gradient(self._name, self._plan, inputs, [*places, *outputs])
            if gradient is None:
                return None
        if None in outputs:
            nothing = nothing_like(inputs[0])
            place = recipe.empty(nothing.shape, nothing.stride(), nothing.dtype, nothing.device)
            outputs = [place if output is None else output for output in outputs]
        return library.known().Call(tensors, recipe.steps, outputs, gradient)


class Calls:
    """Calls of a function like ones before, by its settings: in C++ where there is no Python in
    what they do, else the latest one alone."""

    def __init__(self):
        self._latest = Latest()
        self._native, self._find = None, _nothing

    def again(self, tensors: tuple, settings: tuple):
        """What the function returns for a call like one before; None where there was none."""
        if torch.compiler.is_dynamo_compiling():
            return None
        found = self._find(tensors, settings)
        if found is not None:
            return found
        again = self._latest.find(tensors, settings)
        return None if again is None else again(tensors)

    def keep(self, tensors: tuple, settings: tuple, again: Again) -> None:
        """Let calls like this one be computed by `again`."""
        native = again.native(tensors)
        if native is None:
            self._latest.keep(tensors, settings, again)
            return
        if self._native is None:
            self._native = library.known().Calls(in_a_group)
            self._find = self._native.function()
        self._native.add(settings, native)


def _nothing(tensors, settings):
    return None


class _Context(types.SimpleNamespace):
    """What a gradient sees of a call: of torch's context, what gradients of ours use."""

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool):
        self.zeros = value


def _gradient(name: str, plan: plans.Plan, inputs: tuple, places: list[int | None]):
    """The gradient of calls like this one; None where it keeps another tensor than the call's.

    places: of the tensors among the inputs, and of the outputs.
    """
    backward, save, write = library.gradient_of(name)
    tensors = inputs[: plan.takes]
    outputs = [nothing_like(inputs[0]) if x is None else x for x in plan.outputs(tensors)]
    kept = _Context(plan=plan, saved_tensors=(), zeros=True)
    save(kept, inputs, outputs[0] if len(outputs) == 1 else tuple(outputs))
    known = [*tensors, *outputs]
    saved = [_place(x, known) for x in kept.saved_tensors]
    if _NOWHERE in saved:
        return None
    del kept.plan  # which has what is made here
    given = [i for i, x in enumerate(tensors) if x is not None]
    in_python = _InPython(backward, write, kept, given, len(inputs))
    return library.known().Gradient(
        name=f"npu_ops::{name}",
        given=[places[i] for i in given],
        saved=[None if i is None else places[i] for i in saved],
        zeros=kept.zeros,
        in_python=in_python,
    )


class _InPython:
    """Computes gradients of calls that C++ recorded, and says how it can do so itself.

    given: the places of tensors among the operator's `inputs`.
    """

    def __init__(self, backward, write, kept: _Context, given: list[int], inputs: int):
        self._backward, self._write, self._kept = backward, write, kept
        self._given, self._inputs = given, inputs
        self._tries = 8  # of gradients that are laid out anew each time there is nothing to say

    def __call__(self, grads: tuple, saved_tensors: tuple, needs: list[bool]) -> tuple:
        """The gradients of what was given, and what to go by: a Backward, or None."""
        needed = [False] * self._inputs
        for i, one in zip(self._given, needs, strict=True):
            needed[i] = one
        ctx = _Context(**vars(self._kept))
        ctx.saved_tensors, ctx.needs_input_grad = saved_tensors, tuple(needed)
        found = self._backward(ctx, *grads)
        return tuple([found[i] for i in self._given]), self._learned(ctx, grads, needs)

    def _learned(self, ctx: _Context, grads: tuple, needs: list[bool]):
        values = (*grads, *ctx.saved_tensors)
        if self._write is None or torch.is_grad_enabled() or not self._tries:
            return None
        if library.watched(values) is not None or registry.launches_are_watched():
            return None
        self._tries -= 1
        recipe = Recipe(len(values))
        found = self._write(recipe, ctx, grads)
        if found is None:
            return None
        self._tries += 1
        results = [found[i] for i in self._given]
        known = library.known()
        return known.Backward(needs=needs, values=values, recipe=recipe.steps, results=results)


_NOWHERE = -1


def _place(x: torch.Tensor | None, known: list) -> int | None:
    if x is None:
        return None
    return next((i for i, y in enumerate(known) if y is x), _NOWHERE)
