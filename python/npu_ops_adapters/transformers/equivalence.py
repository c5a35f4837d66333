"""Tests whether a model's function computes what npu-ops does, by comparing small calls.

Each model of transformers has its own copies of all functions. A copy with a known signature is
replaced only if its results agree. A copy with another formula is left alone.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from npu_ops.core import compare, env, make
from npu_ops_adapters.patching import Names, wrapped

# The bf16 tolerance is wide, because npu-ops rounds at other places than transformers.
_CLOSE = {
    torch.float32: compare.Tolerance(1e-4, 1e-4),
    torch.bfloat16: compare.Tolerance(2e-2, 5e-2),
}


class Variant(NamedTuple):
    """One formula that npu-ops implements.

    ours: takes the arguments of the model's function and returns a function that computes the
    result.
    calls: takes the function or its class, and returns argument tuples of small calls. Each time it
    makes new tensors, because a call may write to them.
    build: makes a module of a class; all sizes are multiplied by a factor. None for a function.
    reads: names of module settings that `ours` handles itself, so their values may differ.
    """

    ours: Callable
    calls: Callable[[Any], list[tuple]]
    build: Callable[[type, int], torch.nn.Module] | None = None
    reads: Names = ()

    def on(self, subject: Any) -> Callable:
        """Return `ours`. For a class, return `ours` with a check of the module's settings.

        The check raises ValueError if they differ from the settings of the small modules that
        `build` makes.
        """
        if self.build is None:
            return self.ours
        with _undisturbed():
            modules = [self.build(subject, factor) for factor in (1, 2)]
        known = {n: v for n, v in _settings(*modules).items() if n not in self.reads}
        return functools.partial(_with_settings, self.ours, known)


@functools.cache
def choose(subject: Any, variants: tuple[Variant, ...]) -> Variant | str:
    """Return the first formula that the model implements, or the reason why there is none.

    Args:
        subject: the model's original function, or the class whose `forward` it is.
    """
    function = innermost(getattr(subject, "forward", subject))
    reason = ""
    for variant in variants:
        reason = _difference(variant, function, subject)
        if not reason:
            return variant
    return f"a small call gives another result than npu-ops: {reason}"


def innermost(function: Any) -> Any:
    """Return the PyTorch function inside the decorators that select kernels of other packages."""
    if issubclass(type(function), types.FunctionType):
        *_, function = wrapped(function)
    return function


def _difference(variant: Variant, function: Callable, subject: Any) -> str:
    try:
        function = _of_pytorch(function)
        with _undisturbed():
            for theirs, mine in zip(variant.calls(subject), variant.calls(subject), strict=True):
                expected, actual = function(*theirs), variant.ours(*mine)()
                _assert_same((actual, mine), (expected, theirs))
    except Exception as error:  # a model may fail in any way here
        return f"{type(error).__name__}: {error}"
    return ""


def _of_pytorch(function: types.FunctionType) -> Callable:
    """Copy a function so that it calls the `innermost` form of each function it names."""
    called = function.__globals__.keys() & set(function.__code__.co_names)
    known = function.__globals__ | {n: innermost(function.__globals__[n]) for n in called}
    copied = types.FunctionType(
        function.__code__, known, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


@contextlib.contextmanager
def _undisturbed():
    """Run the block on the CPU without gradients, autocast or the program's npu-ops settings.

    The state of PyTorch's random generator is kept.
    """
    plain = {"impl": {}, "strict": False, "log": "once", "consistent": ""}
    with contextlib.ExitStack() as contexts:
        if any(getattr(env.settings, name) != value for name, value in plain.items()):
            contexts.enter_context(env.override(**plain))
        for context in (
            torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"),
            torch.random.fork_rng(devices=()),
        ):  # fmt: skip
            contexts.enter_context(context)
        yield


def _assert_same(actual: Any, expected: Any) -> None:
    """Raise AssertionError unless all tensors agree: results, and arguments that were written."""
    pairs = zip(_tensors(actual), _tensors(expected), strict=True)
    for number, (a, e) in enumerate(pairs):
        if a.dtype != e.dtype:
            raise AssertionError(f"tensor {number}: {a.dtype}, the model's is {e.dtype}")
        compare.assert_close(f"tensor {number}", a, e, _CLOSE[e.dtype])


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for part in value for tensor in _tensors(part)]
    return _tensors(value.states) if hasattr(value, "states") else []


def _settings(one: torch.nn.Module, other: torch.nn.Module) -> dict:
    """Return the settings that do not depend on size: equal in two modules of different sizes."""
    bare = vars(torch.nn.Module())
    mine, others = vars(one), vars(other)
    return {n: v for n, v in mine.items() if n not in bare and n in others and v == others[n]}


def _with_settings(ours: Callable, known: dict, module, *args, **kwargs):
    for name, value in known.items():
        if getattr(module, name, value) != value:
            raise ValueError(f"{name}: got {getattr(module, name)!r}, needs {value!r}")
    return ours(module, *args, **kwargs)


# Random tensors and modules for small calls


class Draw:
    """Random numbers that are the same each time, and leave the program's generator alone."""

    def __init__(self):
        self._draw = torch.Generator("cpu").manual_seed(0)

    def normal(self, *shape: int, dtype=torch.float32) -> torch.Tensor:
        return make.normal(shape, self._draw).to(dtype)

    def uniform(self, *shape: int) -> torch.Tensor:
        return make.uniform(shape, self._draw)

    def fill(self, module: torch.nn.Module) -> torch.nn.Module:
        """Replace a module's parameters, often ones and zeros, by random numbers."""
        module = module.float()
        for parameter in module.parameters():
            parameter.copy_(self.normal(*parameter.shape) / 2)
        return module


def small_norm(cls: type, factor: int) -> torch.nn.Module:
    """Make a norm of a model's class: 8 * factor elements, a large eps, random weights."""
    if "weight" not in innermost(cls.forward).__code__.co_names:
        raise ValueError("weight: got None, needs a weight for each element")
    return Draw().fill(cls(8 * factor, eps=0.1 / factor))
