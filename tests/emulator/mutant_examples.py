"""Calls that mutants of AscendC kernels run, with expected results: an op's cases
and sample calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from mutant_calls import MORE, WRONG
from support import evaluate, floats, forced, on_device

import npu_ops
from npu_ops.core import cases as kit
from npu_ops.core import rng
from npu_ops.core.cases import Call
from npu_ops.core.compare import assert_close

LARGEST = 130_000  # elements of a case's arguments: the twin takes about 1 us each
# More for pools: the twin accesses only a few slots.
LARGEST_OF = {"gated_delta_rule_update": 270_000, "causal_conv1d_update": 270_000}
# (vector cores, bytes of their memory): the chip's own, and few cores with many tiles each.
CORES = ((None, None), (2, 144 * 1024))
# Arguments that are also tried with values whose exponentials overflow.
STEEP = {"gdn_gate": ("a", "b"), "rms_norm_gated": ("z",)}
# Each call's argument with positions; also tried as int32, and with a position outside the table.
POSITIONS = {"rope_gather": "position_ids", "cached": "positions",
             "qk_norm_rope_cached": "positions"}  # fmt: skip
DTYPES = torch.float32, torch.bfloat16, torch.float16


@dataclasses.dataclass(frozen=True)
class Example:
    """A call on the NPU, with the expected results, gradients and written tensors."""

    name: str
    op: str
    function: Callable
    arguments: dict
    wrt: tuple[str, ...]
    writes: tuple[str, ...]
    expected: dict
    dtype: torch.dtype
    cores: int | None = None
    memory: int | None = None

    def run(self) -> bool:
        """Run the call; return whether its results are right. Raises what the call raises."""
        actual = compute(self.op, "ascendc", self.function, self.arguments, self.wrt, self.writes)
        try:
            for name, value in actual.items():
                tolerance = kit.tolerance(self.op, name, value, self.dtype)
                right = self.expected[name].to(value.device)
                # NaN is right where NaN is expected.
                value, right = (torch.nan_to_num(x, nan=100.0) for x in (value, right))
                assert_close(name, value, right, tolerance)
        except AssertionError:
            return False
        return True


def compute(op: str, implementation: str, function, inputs: dict, wrt, writes) -> dict:
    """Return results, gradients and written tensors by name.

    The inputs stay unchanged, and the random state is fixed.
    """
    inputs = inputs | {name: inputs[name].clone() for name in writes}

    def state(device, generator):
        return torch.tensor((3, 5), device=device)

    with mock.patch.object(rng, "new_state", state), forced(implementation, op):
        found = evaluate(function, inputs, wrt)
    return found | {f"{name} after": inputs[name] for name in writes}


def examples(op: str) -> list[Example]:
    """Return an op's small calls, and its cases that are not too large, each in one dtype."""
    made = [*of_cases(op), *of_calls(op), *of_more_calls(op), *of_wrong_calls(op)]
    return [dataclasses.replace(of_all, cores=cores, memory=memory)
            for of_all in made for cores, memory in CORES]  # fmt: skip


def of_cases(op: str) -> Iterator[Example]:
    largest, number = LARGEST_OF.get(op, LARGEST), 0
    for case in kit.of(op).CASES:
        dtype = DTYPES[number % 3]
        if case.large or case.tokens == 0 or elements(case.inputs(torch.float32)) > largest:
            continue
        inputs, on_npu = case.inputs(dtype), case.inputs(dtype, "npu")
        function, wrt = kit.function(op, case), kit.differentiable(op, case)
        writes = written(op, inputs)
        yield example(case.name, op, function, inputs, on_npu, wrt, writes, dtype)
        if number == 0 and op in STEEP:
            steep = {name: inputs[name] * 40 for name in STEEP[op]}
            on_npu = on_npu | on_device(steep, "npu")
            yield example("steep", op, function, inputs | steep, on_npu, wrt, writes, dtype)
        number += 1


def of_calls(op: str) -> Iterator[Example]:
    for call in kit.of(op).CALLS:
        yield of_call(op, call, call.arguments(), in_place=False)
        if call.in_place:
            yield of_call(op, call, call.arguments(in_place=True), in_place=True)
        if name := POSITIONS.get(str(call)):
            inputs = call.arguments()
            yield of_call(op, call, inputs | {name: inputs[name].int()}, in_place=False)
            yield outside(op, call, name)


def of_call(op: str, call: Call, inputs: dict, in_place: bool) -> Example:
    wrt = kit.of(op).DIFFERENTIABLE if call.differentiable is None else call.differentiable
    wrt = tuple(name for name in wrt if name in inputs and not in_place)
    writes = call.writes if in_place or not call.in_place else ()
    function, on_npu = getattr(npu_ops, call.function), on_device(inputs, "npu")
    name = f"{call} in place" if in_place else str(call)
    return example(name, op, function, inputs, on_npu, wrt, writes, torch.float32)


def outside(op: str, call: Call, name: str) -> Example:
    """Return a call whose last position, on the last axis, is outside the table: NaN rows."""
    inputs = call.arguments()
    positions = inputs[name].clone()
    tables = {table: inputs[table] for table in ("cos", "sin", "cos_sin_cache") if table in inputs}
    positions.view(-1)[-1] = next(iter(tables.values())).shape[0]
    longer = {table: torch.cat((rows, torch.full_like(rows[:1], torch.nan)))
              for table, rows in tables.items()}  # fmt: skip
    given = of_call(op, call, inputs | longer | {name: positions}, in_place=False)
    on_npu = on_device(inputs | {name: positions}, "npu")
    return dataclasses.replace(given, name=f"{call}-outside", arguments=on_npu)


def of_more_calls(op: str) -> Iterator[Example]:
    for name, inputs in MORE.get(op, {}).items():
        dtype = next(x.dtype for x in inputs.values() if isinstance(x, torch.Tensor))
        wrt = tuple(name for name in kit.of(op).DIFFERENTIABLE if name in inputs)
        function, writes = getattr(npu_ops, op), written(op, inputs)
        yield example(name, op, function, inputs, moved(inputs), wrt, writes, dtype)


def moved(inputs: dict) -> dict:
    """Return the arguments on the NPU with the same memory layout, also those in a tuple."""

    def one(value):
        if isinstance(value, tuple):
            return tuple(map(one, value))
        if not isinstance(value, torch.Tensor):
            return value
        size = value.untyped_storage().nbytes() // value.element_size()
        there = value.as_strided((size,), (1,), 0).npu()
        return there.as_strided(value.shape, value.stride(), value.storage_offset())

    return {name: one(value) for name, value in inputs.items()}


def of_wrong_calls(op: str) -> Iterator[Example]:
    """Yield calls with invalid index values: affected rows are NaN, and nothing else changes."""
    for wrong in WRONG.get(op, ()):
        function, on_npu = getattr(npu_ops, op), on_device(wrong.given, "npu")
        writes = written(op, wrong.given)
        made = example(wrong.name, op, function, wrong.right, on_npu, (), writes, torch.float32)
        wrong.correct(made.expected)
        yield made


def example(name, op, function, inputs, on_npu, wrt, writes, dtype) -> Example:
    right = compute(op, "reference", function, floats(inputs, torch.float64), wrt, writes)
    return Example(name, op, function, on_npu, wrt, writes, right, dtype)


def written(op: str, inputs: dict) -> tuple[str, ...]:
    """Return the names of the arguments that an op always writes."""
    (names,) = {call.writes for call in kit.of(op).CALLS if not call.in_place} or {()}
    return tuple(name for name in names if name in inputs)


def elements(inputs: dict) -> int:
    return sum(value.numel() for value in inputs.values() if isinstance(value, torch.Tensor))
