"""Invalid calls: the WRONG list of every op's `cases.py`, and what every function refuses.

An invalid call raises the same error on every path: by each implementation, eager and compiled,
with and without gradient, in the first call and later ones. It changes nothing.
"""

import dataclasses
import functools
import inspect
import re

import calls
import pytest
import torch
from npu_ops_tools.where import ops
from support import devices, forced

import npu_ops
from npu_ops.core import cases
from npu_ops.core.cases import Wrong, cast, changed, shaped
from npu_ops.core.registry import Table

CALLS = calls.CALLS
FORM = re.compile(r"\w+: got .+, needs .+", re.S)
NAMES = re.compile(r"(\w+): got .+, needs (\w+)'s ")


def function_of(wrong):
    return getattr(npu_ops, CALLS[wrong.call].function)


def right(wrong):
    return changed(CALLS[wrong.call].arguments(wrong.in_place), wrong.given)


def refusals(call):
    """Yield (error, message, change) for types, dtypes and devices that every function refuses."""
    arguments, (first, *others) = call.arguments(), calls.floats(call)
    annotations = inspect.signature(getattr(npu_ops, call.function)).parameters
    integer = [name for name in call.tensors() if not arguments[name].is_floating_point()]
    for name in call.tensors():
        floating = name in (first, *others)
        dtypes = "int64 bool complex64 float8_e5m2" if floating else "float32 bool int16"
        for dtype in dtypes.split():
            yield TypeError, f"{name}: got {dtype}, needs ", {name: cast(getattr(torch, dtype))}
        for value in ([1.0], "x", *([] if may_be_none(annotations[name]) else [None])):
            yield TypeError, f"{name}: got {type(value).__name__}, needs a tensor", {name: value}
        if name != first:
            yield ValueError, f"{name}: got device meta, needs ", {name: to_meta}
        yield ValueError, "", {name: shaped()}
    assert len(integer) + len(others) + 1 == len(call.tensors())


def refusals_of_given(wrong):
    """Yield (error, message, change) for tensors that only some valid calls have."""
    arguments, usual = right(wrong), CALLS[wrong.call].tensors()
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and name not in usual:
            dtypes = "int64 bool" if value.is_floating_point() else "float32 bool int16"
            for dtype in dtypes.split():
                yield TypeError, f"{name}: got {dtype}, needs ", {name: cast(getattr(torch, dtype))}
            yield TypeError, f"{name}: got list, needs a tensor", {name: [1.0]}
            yield ValueError, f"{name}: got device meta, needs ", {name: to_meta}
            yield ValueError, "", {name: shaped()}


def to_meta(right):
    return right.to("meta")


def may_be_none(parameter):
    return "None" in str(parameter.annotation)


DECLARED = [wrong for op in ops() for wrong in getattr(cases.of(op), "WRONG", [])]
RIGHT = [dataclasses.replace(w, change={}) for w in {
    (w.call, str(w.given), w.in_place): w for w in DECLARED
}.values()]  # fmt: skip
GENERAL = [
    Wrong(str(call), {}, change, error, says, in_place=False, reads=False)
    for call in CALLS.values()
    for error, says, change in refusals(call)
] + [
    dataclasses.replace(one, change=change, error=error, says=says, reads=False)
    for one in RIGHT
    for error, says, change in refusals_of_given(one)
]
every_wrong = pytest.mark.parametrize("wrong", [*DECLARED, *GENERAL], ids=str)


def on(device, arguments):
    """Return the arguments on a device; tensors on meta stay there."""

    def move(value):
        if isinstance(value, tuple) and all(isinstance(x, torch.Tensor) for x in value):
            return tuple(map(move, value))
        is_here = isinstance(value, torch.Tensor) and value.device.type == "cpu"
        return value.to(device) if is_here else value

    return {name: move(value) for name, value in arguments.items()}


def complaint(wrong, device="cpu", function=None):
    """Return the message of an invalid call, which must change no argument and draw no numbers."""
    # moved twice: a change may set strides
    arguments = on(device, changed(on(device, right(wrong)), wrong.change))
    before, state = snapshot(arguments), torch.get_rng_state()
    with pytest.raises(Exception) as raised:
        (function or function_of(wrong))(**arguments)
    assert type(raised.value) is wrong.error, raised.value
    assert snapshot(arguments) == before and torch.equal(torch.get_rng_state(), state)
    return str(raised.value)


def snapshot(arguments):
    """Return each tensor's version and bits, by name."""
    return {
        name: (value._version, value.detach().cpu().contiguous().view(torch.uint8).tolist())
        for name, value in arguments.items()
        if isinstance(value, torch.Tensor) and value.device.type != "meta" and value.dim()
    }


def call_right(wrong, device):
    function_of(wrong)(**on(device, right(wrong)))


@pytest.mark.parametrize("device", devices())
@every_wrong
def test_a_wrong_call_is_refused_in_one_way(wrong, device):
    """The message stays the same: in later calls, without gradients and by the reference."""
    if wrong.reads and device != "cpu":
        return call_right(wrong, device)  # each op's own tests cover devices
    first = complaint(wrong, device)
    assert first.startswith(wrong.says) and FORM.match(first)
    assert ".h:" not in first and ".cpp:" not in first
    known, names = inspect.signature(function_of(wrong)).parameters, NAMES.match(first)
    assert not names or names[1] not in known or names[2] in known  # k may be a part of qkv
    later = [complaint(wrong, device)]
    for _ in range(3):
        call_right(wrong, device)
    later.append(complaint(wrong, device))
    needs_gradient = any(getattr(x, "requires_grad", 0) for x in change_of(wrong).values())
    if not needs_gradient:
        with torch.no_grad():
            later.append(complaint(wrong, device))
    with forced("reference", *Table.tables):
        later.append(complaint(wrong, device))
    assert set(later) == {first}


def change_of(wrong):
    return changed(right(wrong), wrong.change)


@pytest.mark.parametrize("wrong", DECLARED, ids=str)
def test_explain_makes_the_same_complaint(wrong):
    explain = functools.partial(npu_ops.explain, function_of(wrong))
    assert complaint(wrong, function=explain).startswith(wrong.says)


@pytest.mark.parametrize("call", CALLS)
def test_compiled_calls_are_refused_in_the_same_way(call):
    """One call per type of error. Operators check index values: see test_index_values.py."""
    of_call = {w.error: w for w in DECLARED if w.call == call and not w.reads}
    for wrong in of_call.values():
        torch._dynamo.reset()
        function = torch.compile(function_of(wrong), backend="eager")
        assert complaint(wrong, function=function) == complaint(wrong)


@pytest.mark.parametrize("wrong", RIGHT, ids=lambda wrong: f"{wrong.call}-{[*wrong.given]}")
def test_the_right_calls_are_right(wrong):
    """The unchanged calls pass, so an invalid call fails because of its change."""
    call_right(wrong, "cpu")


def test_wrong_calls_are_declared_once_and_of_every_call():
    declaring = [cases.of(op) for op in ops() if hasattr(cases.of(op), "WRONG")]
    named = {str(call) for module in declaring for call in module.CALLS}
    assert {wrong.call for wrong in DECLARED} == named
    assert all(re.match(r"\w+: got .+", wrong.says) for wrong in DECLARED)
    keys = {(str(wrong), str(wrong.change), str(wrong.given)) for wrong in DECLARED}
    assert len(keys) == len(DECLARED)


@pytest.mark.parametrize("op", ["layer_norm", "npu_ops::rope", torch.nn.functional.dropout, None])
def test_explain_refuses_what_is_no_function_of_ours(op):
    with pytest.raises(ValueError, match="^op: got .*, needs one of "):
        npu_ops.explain(op, torch.ones(2, 3))
