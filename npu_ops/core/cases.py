"""The contents of an op's `cases.py`, from which tests, benchmarks and tools learn about the op.

Required:

    CASES           named shapes, see `Case`; `npu-ops doctor` reports on the first
    TOLERANCES      dtype of a result -> `Tolerance`, against fp64 on the same inputs
    DIFFERENTIABLE  names of the arguments that have a gradient; () for none
    REPRESENTATIVE  names of the cases that together take every branch of the Triton kernels; the
                    most ordinary comes first
    CALLS           at least one small fp32 `Call` of each public function
    of_model        (Model, tokens) -> cases with that model's shapes; [] if it has no such layer

Optional:

    WRONG                `wrong(...)`: invalid calls, and the error each must raise
    OPTIONS              `options(...)`: changes of a call that every implementation honours
    DECLINED             `declined(...)`: calls that NPU kernels do not support, and why
    SUM_TOLERANCES       tolerances for the gradient of a 1-D `bias`, which is a sum over all rows
    TOLERANCES_BY_INPUT  True: choose the tolerance by the dtype of the inputs, not of the result

`tests/test_layout.py` checks each op's module for this.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable
from types import ModuleType
from typing import Protocol

import torch

from npu_ops.core import make
from npu_ops.core.compare import Tolerance


class Case(Protocol):
    """The shapes of one call, as a frozen dataclass.

    tokens: number of rows; tools reduce it with `dataclasses.replace`.
    large: the case takes seconds, so only benchmarks and `make test-all` run it.

    Two attributes are optional. `function` names the public function to call; the default is the
    op's first. `differentiable` overrides the op's DIFFERENTIABLE.
    """

    name: str
    tokens: int
    large: bool

    def inputs(self, dtype: torch.dtype, device="cpu", seed: int = 0) -> dict:
        """Return the function's arguments by name.

        The numbers are the same on every device and do not depend on torch's defaults
        (`npu_ops.core.make`).
        """


@dataclasses.dataclass(frozen=True)
class RowCase:
    """A `Case` of an op that works along rows.

    Each tensor in `names` is `[tokens, heads, dim]`: the first columns of a matrix with `behind`
    more columns, so its rows are strided.
    """

    name: str
    tokens: int
    heads: int
    dim: int
    behind: int = 0
    names: tuple[str, ...] = ("x",)
    large: bool = False

    def inputs(self, dtype: torch.dtype, device="cpu", seed: int = 0) -> dict:
        """Return normally distributed inputs by name; the same numbers on every device."""
        draw = torch.Generator(device="cpu").manual_seed(seed)
        width = self.heads * self.dim
        shape = self.tokens, width + self.behind
        drawn = {name: make.normal(shape, draw).to(device, dtype) for name in self.names}
        return {n: x[:, :width].unflatten(1, (self.heads, self.dim)) for n, x in drawn.items()}


@dataclasses.dataclass(frozen=True)
class Call:
    """A small valid call of a public function, for tests that cover every function.

    function: name of the function in npu_ops.
    make: called with a seeded `torch.randn`; returns the arguments by name, in fp32.
    name: name of the call in tests; the function's name unless given.
    writes: arguments that the in-place form overwrites.
    in_place: changes of the arguments that select the in-place form.
    fixed: changes of the arguments that make the call deterministic.
    differentiable: arguments with a gradient. None: those of the op's DIFFERENTIABLE that it has.
    """

    function: str
    make: Callable[[Callable[..., torch.Tensor]], dict]
    name: str = ""
    writes: tuple[str, ...] = ()
    in_place: dict = dataclasses.field(default_factory=dict)
    fixed: dict = dataclasses.field(default_factory=dict)
    differentiable: tuple[str, ...] | None = None

    def __str__(self):
        return self.name or self.function

    def arguments(self, in_place: bool = False, **changes) -> dict:
        """Return the arguments by name, with the same numbers each time.

        in_place: return those of the in-place form. changes: arguments to replace.
        """
        draw = torch.Generator(device="cpu").manual_seed(0)
        made = self.make(lambda *shape: make.normal(shape, draw))
        return made | (self.in_place if in_place else {}) | changes

    def tensors(self) -> list[str]:
        """Return the names of the arguments that are tensors."""
        return [n for n, x in self.arguments().items() if isinstance(x, torch.Tensor)]


@dataclasses.dataclass(frozen=True)
class Option:
    """A change of a valid call that every implementation must honour as the reference does.

    call: name of a call in CALLS.
    given: changes of that call to make first; the result is still a valid call.
    change: the change under test: arguments by name, each a value or a function of the old value.
    same: True if results must stay the same; False if they must differ.
    trains: whether to compare gradients as well.
    """

    call: str
    given: dict
    change: dict
    same: bool
    trains: bool

    def __str__(self):
        changes = (f"{name}={getattr(x, '__qualname__', x)}" for name, x in self.change.items())
        return f"{self.call}{'+' * bool(self.given)}: {', '.join(changes)}"


@dataclasses.dataclass(frozen=True)
class Wrong:
    """A change that makes a valid call invalid.

    call, given, change: as in `Option`.
    error: type of the exception.
    says: how its message begins.
    in_place: the valid call is the in-place form.
    reads: the error depends on values in a tensor, which are not checked on a device.
    """

    call: str
    given: dict
    change: dict
    error: type[Exception]
    says: str
    in_place: bool
    reads: bool

    def __str__(self):
        return f"{self.call}: {self.says}"


def options(call: str, *changes: dict, given: dict | None = None, same=False, trains=True):
    """Return an `Option` for each of `changes`; the other arguments are as in `Option`."""
    return [Option(call, given or {}, change, same, trains) for change in changes]


def wrong(
    call: str,
    error: type[Exception],
    *rows: tuple[str, dict],
    given: dict | None = None,
    in_place: bool = False,
    reads: bool = False,
) -> list[Wrong]:
    """Return a `Wrong` for each row: how the message begins, and the change to a valid call."""
    common = {"given": given or {}, "in_place": in_place, "reads": reads}
    return [Wrong(call=call, change=made, error=error, says=says, **common) for says, made in rows]


@dataclasses.dataclass(frozen=True)
class Declined:
    """A change of a valid call that an NPU implementation does not support.

    call, given, change: as in `Option`. The implementation supports the call without the change.
    implementation: its name. says: how its reason begins.
    """

    call: str
    given: dict
    change: dict
    implementation: str
    says: str

    def __str__(self):
        return f"{self.call}: {self.implementation}: {self.says}"


def declined(call: str, implementation: str, *rows: tuple[str, dict], given: dict | None = None):
    """Return a `Declined` for each row: how the reason begins, and the change to a valid call."""
    return [Declined(call, given or {}, change, implementation, says) for says, change in rows]


def changed(arguments: dict, change: dict) -> dict:
    """Return the arguments with a change applied: new values, or functions of the old values."""
    return arguments | {
        name: to(arguments.get(name)) if callable(to) else to for name, to in change.items()
    }


def shapes(name: str, needs: str, *wrong_shapes: tuple[int, ...]):
    """Make rows for `wrong` that give an argument each of these shapes."""
    return [
        (f"{name}: got shape {list(shape)}, needs {needs}", {name: shaped(*shape)})
        for shape in wrong_shapes
    ]


def values(name: str, needs: str, *wrong_values):
    """Make rows for `wrong` that give a non-tensor argument each of these values."""
    return [(f"{name}: got {value!r}, needs {needs}", {name: value}) for value in wrong_values]


# Functions for `change`: each returns a function of an argument's old value.


def shaped(*shape: int, dtype: torch.dtype | None = None, device="cpu") -> Callable:
    """Replace a tensor by one of another shape, with numbers from -1 to 1.

    The dtype is the old one unless given. A tensor that is not floating becomes zeros.
    """

    def change(right):
        of = right.dtype if isinstance(right, torch.Tensor) else torch.float32
        made = torch.linspace(-1, 1, math.prod(shape), dtype=torch.float32, device="cpu")
        made = made if (dtype or of).is_floating_point else torch.zeros_like(made)
        return made.view(shape).to(device, dtype or of)

    return change


def cast(dtype: torch.dtype) -> Callable:
    """Cast the value to another dtype.

    The cast runs on the CPU: torch_npu turns float64 into float32 and crashes with float8.
    """
    return lambda right: right.cpu().to(dtype).to(right.device)


def replaced(*place: int, to: int) -> Callable:
    """Set one element of an index tensor to `to`."""

    def change(right):
        right = right.clone()
        right[place] = to
        return right

    return change


def of(op: str) -> ModuleType:
    """Return the `cases` module of an op."""
    return importlib.import_module(f"npu_ops.ops.{op}.cases")


def function(op: str, case: Case) -> Callable:
    """Return the public function that a case calls."""
    package = importlib.import_module(f"npu_ops.ops.{op}")
    return getattr(package, getattr(case, "function", package.__all__[0]))


def differentiable(op: str, case: Case) -> tuple[str, ...]:
    """Return the names of a case's arguments that have a gradient; some of them may be None."""
    return getattr(case, "differentiable", of(op).DIFFERENTIABLE)


# With fewer elements than this, one bad element dominates the error ratio. `tolerance` then doubles
# the limit of the ratio.
_MANY = 16


def tolerance(op: str, name: str, result: torch.Tensor, of_inputs: torch.dtype) -> Tolerance:
    """Return the tolerance for one result of an op.

    name: "output 0", "gradient of x", ...
    of_inputs: the dtype that the case's inputs were made with.
    """
    module = of(op)
    sums = name == "gradient of bias" and result.dim() == 1 and hasattr(module, "SUM_TOLERANCES")
    tolerances = module.SUM_TOLERANCES if sums else module.TOLERANCES
    by_input = getattr(module, "TOLERANCES_BY_INPUT", False)
    found = tolerances[of_inputs if by_input else result.dtype]
    if result.numel() >= _MANY:
        return found
    return dataclasses.replace(found, ratio=2 * found.ratio)
