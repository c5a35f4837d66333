"""Records the kernel launches that an op's cases would make on an SoC, without running on it.

Each launch has the SoC's core counts and tiles, and its scalar arguments.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import difflib
from collections.abc import Iterator

import torch
from npu_ops_emulator import vendor

from npu_ops.core import cases, hardware, registry
from npu_ops_tools.compile.files import from_file
from npu_ops_tools.compile.launches import Launch, forward_and_backward, recorded
from npu_ops_tools.launches import Counter, seen_in_our_operators
from npu_ops_tools.model import interpreted

SHOWN = 6  # cases that an error message lists


def of_case(
    op: str, case: str, dtype: torch.dtype, soc: str, tokens: int | None = None
) -> list[Launch]:
    """Return every Triton launch of a case, forward and backward, in order.

    tokens: overrides the case's own.

    Raises:
        ValueError: there is no such case.
    """
    return of_call(case, soc, *call_of_case(op, case, dtype, tokens))


def call_of_case(op: str, case: str, dtype: torch.dtype, tokens: int | None = None) -> tuple:
    """Return a case's function, its arguments, and the names of those that need a gradient.

    Raises:
        ValueError: there is no such case.
    """
    found = {each.name: each for each in cases.of(op).CASES}
    if case not in found:
        near = difflib.get_close_matches(case, found, SHOWN, cutoff=0) or list(found)[:SHOWN]
        more = f" (of {len(found)})" if len(found) > len(near) else ""
        raise ValueError(f"case: got {case!r}, needs one of {', '.join(near)}{more}")
    chosen = dataclasses.replace(found[case], tokens=tokens or found[case].tokens)
    function, wrt = cases.function(op, chosen), cases.differentiable(op, chosen)
    return function, chosen.inputs(dtype), wrt


def beside(soc: str, function, inputs: dict, wrt: tuple[str, ...] = ()) -> collections.Counter[str]:
    """Count PyTorch's own launches in a call and its backward, by operator."""
    for value in inputs.values():
        if isinstance(value, torch.Tensor):
            value.grad = None  # remove gradients of an earlier call: adding to them would count
    counter = Counter("cpu")  # CPU tensors stand for an NPU's
    with recorded(""), _as_if_on(soc), seen_in_our_operators(counter), counter:
        forward_and_backward(function, inputs, wrt)
    return +counter.found


def of_call(
    label: str, soc: str, function, inputs: dict, wrt: tuple[str, ...] = ()
) -> list[Launch]:
    """Return every launch that a call and its backward would make on an NPU of type `soc`."""
    with recorded(label, interpreted.of_indices) as found, _as_if_on(soc):
        forward_and_backward(function, inputs, wrt)
    return found


@contextlib.contextmanager
def _as_if_on(soc: str) -> Iterator[None]:
    """In a `with` block, dispatch and choose tiles as if tensors were on an NPU of type `soc`."""
    target = soc.removesuffix("-1")
    with registry.as_if_on("npu"), hardware.as_if_soc(target, vendor.cores(target)):
        yield


def kernel_of_file(
    target: str, signature: str, constants: str, grid: int | tuple[int, ...]
) -> list[Launch]:
    """Return the launches of "FILE.py::KERNEL": one, or one per autotuner configuration.

    signature: "x=*bf16:8192,n=i32:8192"; the value of a pointer is its number of elements.
    constants: "BLOCK=1024". grid: programs along each axis.

    Raises:
        ValueError: there is no such kernel, or arguments are unknown, missing or without a value.
    """
    for item in filter(None, (part.strip() for part in signature.split(","))):
        if ":" not in item:
            raise ValueError(f"signature: got {item!r}, needs name=type:value")
    grid = grid if isinstance(grid, tuple) else (grid,)
    label = f"grid {' x '.join(map(str, grid))}"
    return [
        dataclasses.replace(launch, case=", ".join(filter(None, (launch.case, label))), grid=grid)
        for launch in from_file(target, signature, constants)
    ]
