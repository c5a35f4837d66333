"""What an op's `cases.py` offers: all that tests, benchmarks and tools know of an op.

It must have

    CASES           named shapes, see `Case`; of the first, `npu-ops doctor` says what runs it
    TOLERANCES      dtype of a result -> `Tolerance`, against fp64 on the same inputs
    DIFFERENTIABLE  names of the arguments that have a gradient; () for none
    REPRESENTATIVE  names of the cases that together take every branch of the Triton kernels; the
                    most ordinary comes first
    CALLS           a `Call` or more of each public function, small and in fp32
    of_model        (Model, tokens) -> cases with that model's shapes; [] if it has no such layer

and may have

    WRONG                `wrong(...)`: wrong calls, and how each is refused
    OPTIONS              `options(...)`: changes of a call that every implementation honours
    DECLINED             `declined(...)`: calls that kernels for NPUs do not take, and why
    SUM_TOLERANCES       of the gradient of a `bias` of one dimension: a sum over all rows
    TOLERANCES_BY_INPUT  True: every result is judged by the dtype of the inputs, not by its own

`tests/test_layout.py` holds each op to this.
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
    """A frozen dataclass: the shape of a call.

    tokens: how many rows there are; tools put smaller numbers here, with `dataclasses.replace`.
    large: it takes seconds; for benchmarks and `make test-all`.
    It may have `function`, the name of the public function that it is a call of, where that is not
    the op's first; and `differentiable`, where that is not the op's DIFFERENTIABLE.
    """

    name: str
    tokens: int
    large: bool

    def inputs(self, dtype: torch.dtype, device="cpu", seed: int = 0) -> dict:
        """The function's arguments by name: the same numbers on every device, whatever torch's
        defaults are (`npu_ops.core.make`)."""


@dataclasses.dataclass(frozen=True)
class RowCase:
    """A `Case` of an op that works along rows.

    Each tensor in `names` is `[tokens, heads, dim]`: the first columns of a projection that is
    `behind` elements wider.
    """

    name: str
    tokens: int
    heads: int
    dim: int
    behind: int = 0
    names: tuple[str, ...] = ("x",)
    large: bool = False

    def inputs(self, dtype: torch.dtype, device="cpu", seed: int = 0) -> dict:
        """Normal numbers, the same on every device."""
        draw = torch.Generator(device="cpu").manual_seed(seed)
        width = self.heads * self.dim
        shape = self.tokens, width + self.behind
        drawn = {name: make.normal(shape, draw).to(device, dtype) for name in self.names}
        return {n: x[:, :width].unflatten(1, (self.heads, self.dim)) for n, x in drawn.items()}


@dataclasses.dataclass(frozen=True)
class Call:
    """A small right call of a public function, for what must hold for every one of them.

    function: its name in npu_ops. make: `torch.randn` with a seed -> the arguments by name, in
    fp32. name: what tests call it, if not so. writes: arguments that it overwrites; in_place:
    changes of the arguments that make it do so. fixed: changes that leave nothing to chance.
    differentiable: None: the op's DIFFERENTIABLE, as far as the call has them.
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
        """The same each time; `in_place`: such that they are written to."""
        draw = torch.Generator(device="cpu").manual_seed(0)
        made = self.make(lambda *shape: make.normal(shape, draw))
        return made | (self.in_place if in_place else {}) | changes

    def tensors(self) -> list[str]:
        """The names of the arguments that are tensors."""
        return [n for n, x in self.arguments().items() if isinstance(x, torch.Tensor)]


@dataclasses.dataclass(frozen=True)
class Option:
    """A change of a right call, which every implementation honours as the reference does.

    call: of CALLS, by what tests call it. given: changes that make of that call the right one.
    change: arguments by name, each a value or a function of the right value. same: it is another
    way to say what `call` says: results stay as they are, otherwise they change. trains: there is
    a gradient.
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
    """A change of a right call, which makes it a wrong one.

    call, given, change: as of an `Option`. in_place: the right call writes to its arguments.
    error, says: the type of what is raised, and how its message begins. reads: whether it is seen
    by values alone, which are not read on a device.
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
    """OPTIONS of one call, see `Option`."""
    return [Option(call, given or {}, change, same, trains) for change in changes]


def wrong(
    call: str,
    error: type[Exception],
    *rows: tuple[str, dict],
    given: dict | None = None,
    in_place: bool = False,
    reads: bool = False,
) -> list[Wrong]:
    """WRONG calls made from one right call: each row is how its message begins, and the change."""
    common = {"given": given or {}, "in_place": in_place, "reads": reads}
    return [Wrong(call=call, change=made, error=error, says=says, **common) for says, made in rows]


@dataclasses.dataclass(frozen=True)
class Declined:
    """A change of a right call that an implementation for NPUs does not take.

    call, given, change: as of an `Option`; without the change the implementation takes the call.
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
    """DECLINED calls made from one right call: how the reason begins, and the change."""
    return [Declined(call, given or {}, change, implementation, says) for says, change in rows]


def changed(arguments: dict, change: dict) -> dict:
    """Arguments with a change: values, or functions of the values before."""
    return arguments | {
        name: to(arguments.get(name)) if callable(to) else to for name, to in change.items()
    }


def shapes(name: str, needs: str, *wrong_shapes: tuple[int, ...]):
    """Rows for `wrong`: an argument has each of these shapes."""
    return [
        (f"{name}: got shape {list(shape)}, needs {needs}", {name: shaped(*shape)})
        for shape in wrong_shapes
    ]


def values(name: str, needs: str, *wrong_values):
    """Rows for `wrong`: an argument, no tensor, has each of these values."""
    return [(f"{name}: got {value!r}, needs {needs}", {name: value}) for value in wrong_values]


# Changes of one argument.


def shaped(*shape: int, dtype: torch.dtype | None = None, device="cpu") -> Callable:
    """Numbers from -1 to 1 of another shape, in the dtype that the argument has, or that is given;
    zeros where that is no floating one."""

    def change(right):
        of = right.dtype if isinstance(right, torch.Tensor) else torch.float32
        made = torch.linspace(-1, 1, math.prod(shape), dtype=torch.float32, device="cpu")
        made = made if (dtype or of).is_floating_point else torch.zeros_like(made)
        return made.view(shape).to(device, dtype or of)

    return change


def cast(dtype: torch.dtype) -> Callable:
    """The right value in another dtype. The CPU casts: torch_npu turns float64 into float32 and
    crashes with float8."""
    return lambda right: right.cpu().to(dtype).to(right.device)


def replaced(*place: int, to: int) -> Callable:
    """One index value is another."""

    def change(right):
        right = right.clone()
        right[place] = to
        return right

    return change


def of(op: str) -> ModuleType:
    """The `cases` module of an op."""
    return importlib.import_module(f"npu_ops.ops.{op}.cases")


def function(op: str, case: Case) -> Callable:
    """The public function that a case is a call of."""
    package = importlib.import_module(f"npu_ops.ops.{op}")
    return getattr(package, getattr(case, "function", package.__all__[0]))


def differentiable(op: str, case: Case) -> tuple[str, ...]:
    """The arguments of a case that have a gradient; some may be None."""
    return getattr(case, "differentiable", of(op).DIFFERENTIABLE)


# From so many numbers on an error ratio is an average; below, it may be that of the worst of them.
_MANY = 16


def tolerance(op: str, name: str, result: torch.Tensor, of_inputs: torch.dtype) -> Tolerance:
    """What an error of a result may be.

    name: "output 0", "gradient of x", ... of_inputs: the dtype that the case's inputs were made
    with.
    """
    module = of(op)
    sums = name == "gradient of bias" and result.dim() == 1 and hasattr(module, "SUM_TOLERANCES")
    tolerances = module.SUM_TOLERANCES if sums else module.TOLERANCES
    by_input = getattr(module, "TOLERANCES_BY_INPUT", False)
    found = tolerances[of_inputs if by_input else result.dtype]
    if result.numel() >= _MANY:
        return found
    return dataclasses.replace(found, ratio=2 * found.ratio)
