"""Finds the kernels that an op launches, for compilation."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator

from npu_ops_emulator import vendor

from npu_ops.core import cases as op_cases

DTYPES = {
    "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "int64": "i64", "int32": "i32",
    "int16": "i16", "int8": "i8", "uint8": "u8", "bool": "i1",
}  # fmt: skip
FLOATS = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel with its specialization, as a launch would compile it.

    values: values of the signature's arguments, in order. grid: the grid of the launch.
    backward: whether autograd launched it.
    """

    case: str
    kernel: object
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, object], ...]
    options: tuple[tuple[str, object], ...] = ()
    values: tuple = dataclasses.field(default=(), compare=False)
    grid: tuple[int, ...] = dataclasses.field(default=(), compare=False)
    backward: bool = dataclasses.field(default=False, compare=False)

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__


def launches(
    op: str, cases: list[str] | None = None, dtypes=None, soc: str = vendor.SOCS[0]
) -> Iterator[Launch]:
    """Yield every different kernel that an op's cases launch on `soc`, forward and backward.

    The kernels are found by calling the op.
    cases: names of the op's cases; None: all. dtypes: None: float32, bfloat16 and float16.
    """
    import torch

    seen = set()
    for case in op_cases.of(op).CASES:
        if cases is not None and case.name not in cases:
            continue
        function, wrt = op_cases.function(op, case), op_cases.differentiable(op, case)
        # lengths do not change the constants
        small = dataclasses.replace(case, tokens=min(case.tokens, 8))
        for dtype in dtypes or [getattr(torch, name) for name in FLOATS]:
            label = f"{case.name}-{str(dtype).removeprefix('torch.')}"
            for launch in _launched(label, soc, function, small.inputs(dtype), wrt):
                key = (launch.name, launch.signature, launch.constants, launch.options)
                if key not in seen:
                    seen.add(key)
                    yield launch


def _launched(label: str, soc: str, function, inputs: dict, wrt: tuple[str, ...]) -> list[Launch]:
    from npu_ops.core import hardware, registry

    with recorded(label) as found, registry.as_if_on("npu"), hardware.as_if_soc(soc):
        forward_and_backward(function, inputs, wrt)
    return found


def forward_and_backward(function, inputs: dict, wrt: tuple[str, ...]) -> None:
    """Call an op, and its backward with gradients to the tensors in `wrt`."""
    import torch

    for name in wrt:
        if isinstance(inputs.get(name), torch.Tensor):
            inputs[name].requires_grad_()
    outputs = function(**inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    outputs = [out for out in outputs if out is not None and out.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.empty_like(out) for out in outputs])


@contextlib.contextmanager
def recorded(case: str, run: Callable[[Launch], None] | None = None) -> Iterator[list[Launch]]:
    """Record the kernels launched in a block instead of running them.

    run: called with each launch, before the code after the launch continues.
    """
    vendor.frontend()
    from triton.runtime.jit import JITFunction

    found: list[Launch] = []

    def record(kernel, *args, grid, warmup, **named):
        found.append(_specialised(case, kernel, args, named, grid))
        if run:
            run(found[-1])

    before = JITFunction.run
    JITFunction.run = record
    try:
        yield found
    finally:
        JITFunction.run = before


def _specialised(case: str, kernel, args: tuple, named: dict, grid) -> Launch:
    import torch

    parameters = {p.name for p in kernel.params}
    options = {name: value for name, value in named.items() if name not in parameters}
    named = {name: value for name, value in named.items() if name in parameters}
    bound = inspect.signature(kernel.fn).bind(*args, **named).arguments
    constant = {p.name for p in kernel.params if p.is_constexpr}
    constant |= {name for name, value in bound.items() if value is None}
    signature = {name: _type(value) for name, value in bound.items() if name not in constant}
    constants = {name: value for name, value in bound.items() if name in constant}
    launched = (tuple(x.items()) for x in (signature, constants, options))
    values = tuple(bound[name] for name in signature)
    backward = torch._C._current_graph_task_id() >= 0
    grid = grid(bound) if callable(grid) else grid
    return Launch(case, kernel, *launched, values, grid, backward)


def _type(value) -> str:
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    return "*" + DTYPES[str(value.dtype).removeprefix("torch.")]
