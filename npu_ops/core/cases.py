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

    SUM_TOLERANCES       of the gradient of a `bias` of one dimension: a sum over all rows
    TOLERANCES_BY_INPUT  True: every result is judged by the dtype of the inputs, not by its own

`tests/test_layout.py` holds each op to this.
"""

from __future__ import annotations

import dataclasses
import importlib
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
