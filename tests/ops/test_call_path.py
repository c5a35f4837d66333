"""Each eager call is one call of a torch operator, and leaves no state behind.

A call keeps no tensor alive, and changes nothing that the guards of compiled callers check.
"""

import contextlib
import ctypes
import gc
import os

import pytest
import torch
from calls import CALLS, differentiable
from npu_ops_tools.verify.checks import tables
from npu_ops_tools.where import ops
from support import forced, implementations, on_device
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import npu_ops
from npu_ops.core import cases
from npu_ops.core.models import MODELS
from npu_ops.core.registry import Table

every_call = pytest.mark.parametrize("call", CALLS.values(), ids=str)
every_training_call = pytest.mark.parametrize(
    "call", [call for call in CALLS.values() if differentiable(call)], ids=str
)
MODES = pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])


def function_of(call):
    return getattr(npu_ops, call.function)


def outputs_of(found) -> list[torch.Tensor]:
    found = found if isinstance(found, tuple) else (found,)
    return [out for out in found if out is not None]


# Tensors kept after a call


def of_model(op: str, tokens: int):
    """Return a case of the op in the shapes of the first model that has such a layer."""
    found = (cases.of(op).of_model(model, tokens) for model in MODELS.values())
    return next(case for one in found for case in one)


def step(function, inputs: dict, wrt: list[str], by: str) -> None:
    """Run a call and its backward. by: "eager", "checkpointed" or "compiled"."""
    leaves = {name: inputs[name].requires_grad_() for name in wrt}
    call = function
    if by == "checkpointed" and wrt:

        def call(**given):
            return checkpoint(lambda: function(**given), use_reentrant=False)

    outputs = [out for out in outputs_of(call(**inputs)) if out.requires_grad]
    if wrt:
        torch.autograd.grad(
            outputs, list(leaves.values()), [torch.ones_like(out) for out in outputs],
            allow_unused=True,
        )  # fmt: skip


def tensors_alive() -> int:
    gc.collect()
    return sum(type(x) in (torch.Tensor, torch.nn.Parameter) for x in gc.get_objects())


def resident_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def in_turn(op, *more):
    """Mark the test of all but every eighth op as slow, because it takes 10 s per op."""
    return pytest.param(op, *more, marks=[pytest.mark.slow] * (list(ops()).index(op) % 8 > 0))


@pytest.mark.parametrize(
    "op, by", [(op, "eager") for op in ops()] + [in_turn(op, "checkpointed") for op in ops()]
)
def test_no_tensor_outlives_its_call(op, by):
    """Runs up to 40 lengths, within 128 MiB of inputs.

    Resident bytes are compared too: Python's garbage collector does not see tensors held by C++
    only.
    """

    def steps(lengths):
        drawn = 0
        for tokens in lengths:
            case = of_model(op, tokens)
            inputs = case.inputs(torch.float32)
            drawn += sum(x.nbytes for x in inputs.values() if isinstance(x, torch.Tensor))
            if drawn > 2**27:
                break
            wrt = [n for n in cases.differentiable(op, case) if inputs.get(n) is not None]
            for _ in range(2):
                step(cases.function(op, case), inputs, wrt, by)

    steps(range(1, 6))
    alive, resident = tensors_alive(), resident_bytes()
    steps(range(1, 41))
    assert tensors_alive() == alive
    assert resident_bytes() - resident < 32 * 2**20


@pytest.mark.parametrize("op", [in_turn(op) for op in ops()])
def test_a_compiled_call_keeps_no_tensor(op):
    torch._dynamo.reset()
    case = of_model(op, 8)
    function = cases.function(op, case)
    compiled = torch.compile(lambda **given: function(**given), backend="aot_eager", dynamic=True)
    alive = []
    for tokens in (8, 9, 10, 9):
        case = of_model(op, tokens)
        inputs = case.inputs(torch.float32)
        wrt = [n for n in cases.differentiable(op, case) if inputs.get(n) is not None]
        step(compiled, inputs, wrt, "compiled")
        del inputs
        alive.append(tensors_alive())
    assert alive[-1] == alive[-2], alive


# Recompilation of a compiled caller


@MODES
@every_call
def test_eager_calls_between_compiled_ones_recompile_nothing(call, mode):
    torch._dynamo.reset()
    function, wrt = function_of(call), differentiable(call) if mode is torch.enable_grad else []

    def given():
        arguments = call.arguments()
        for name in wrt:
            arguments[name].requires_grad_()
        return arguments

    def loss(**arguments):
        return outputs_of(function(**arguments))[0].sum()

    compiled = torch.compile(loss, backend="aot_eager")
    with mode():
        for _ in range(2):
            compiled(**given())
        for other in CALLS.values():  # calls of this op and all others, in other shapes
            for _ in range(3):
                function_of(other)(**other.arguments())
        function(**given())
        with torch._dynamo.config.patch(error_on_recompile=True):
            compiled(**given())


# Profilers, modes and hooks that see a call


def operators(events: list[FunctionEvent]) -> list[str]:
    """Return the npu_ops torch operators that were called; native kernels are left out."""
    known = {f"npu_ops::{table}{end}" for table in Table.tables for end in ("", "_")}
    return [event.key.removeprefix("npu_ops::") for event in events if event.key in known]


def chosen():
    """Yield (op, call, implementation, device) for each implementation of each op."""
    for op in ops():
        for call in cases.of(op).CALLS:
            for one in implementations(Table.tables[op]):
                name = f"{call}-{'-'.join(one.values)}"
                yield pytest.param(op, call, *one.values, id=name, marks=one.marks)


@pytest.mark.parametrize("op, call, name, device", chosen())
def test_a_profiler_sees_each_call_once(op, call, name, device):
    """Holds for each implementation, forward and backward."""
    inputs, wrt = on_device(call.arguments(), device), differentiable(call)
    verdicts = npu_ops.explain(call.function, **inputs)
    (why_not,) = (verdict.why_not for verdict in verdicts if verdict.implementation == name)
    takes_it = why_not is None or why_not.endswith("comes first")
    for n in wrt:
        inputs[n].requires_grad_()
    # fused_recurrent_gated_delta_rule normalises q and k by two calls of l2norm.
    # chunk_gated_delta_rule does it in its own kernels.
    is_normed = op == "fused_recurrent_gated_delta_rule" and inputs["use_qk_l2norm_in_kernel"]
    norms = ["l2norm", "l2norm"] if is_normed else []
    by = contextlib.ExitStack()
    if takes_it:
        by.enter_context(forced(name, *tables(op)))
    with by:
        with profile(activities=[ProfilerActivity.CPU]) as forward:
            outputs = [x for x in outputs_of(function_of(call)(**inputs)) if x.requires_grad]
        assert _without_products(op, operators(forward.events())) == [*norms, verdicts[0].op]
        if not wrt:
            return
        if name == "aclnn":  # the vendor's operator may have no backward
            by.close()
        with profile(activities=[ProfilerActivity.CPU]) as backward:
            torch.autograd.grad(
                outputs, [inputs[n] for n in wrt], [torch.ones_like(x) for x in outputs],
                allow_unused=True,
            )  # fmt: skip
    mine = verdicts[0].op  # the backward of a rotation is the same operator
    names = [f"{mine}_backward"] if f"{mine}_backward" in Table.tables else [mine]
    seen = _without_products(op, operators(backward.events()))
    assert seen == [*names, *(f"{norm}_backward" for norm in norms)]


def _without_products(op, names):
    """Leave out the calls of linear that grouped_linear makes per group, on CPUs
    and for gradients."""
    return [name for name in names if name != "linear" or op != "grouped_linear"]


# Tensors whose memory does not hold their values


def as_zeros(x):
    return torch._efficientzerotensor(x.shape, dtype=x.dtype, device=x.device)


@pytest.mark.parametrize("changed", [as_zeros, torch._neg_view], ids=["zero tensor", "neg view"])
@every_call
def test_a_tensor_without_its_values_in_memory(call, changed):
    """torch materialises zero tensors and negative views before a kernel gets them."""
    arguments = call.arguments(**call.fixed)
    names = [n for n in call.tensors() if arguments[n].is_floating_point() and n not in call.writes]
    for name in names:
        arguments = call.arguments(**call.fixed)
        odd = changed(arguments[name])
        found = outputs_of(function_of(call)(**arguments | {name: odd}))
        arguments = call.arguments(**call.fixed)
        plain = outputs_of(function_of(call)(**arguments | {name: odd.clone()}))
        for actual, expected in zip(found, plain, strict=True):
            torch.testing.assert_close(actual, expected, equal_nan=True)


@every_call
def test_functionalize(call):
    arguments, function = call.arguments(**call.fixed), function_of(call)
    names = call.tensors()
    rest = {n: x for n, x in arguments.items() if n not in names}

    def of_tensors(*tensors):
        return function(**dict(zip(names, tensors, strict=True)), **rest)

    functional = torch.func.functionalize(of_tensors)
    if (
        call.writes and not call.in_place
    ):  # torch functionalizes no custom operator that writes to its inputs
        with pytest.raises(RuntimeError, match=f"npu_ops::{call.function}"):
            functional(*(arguments[n] for n in names))
        return
    found = functional(*(arguments[n] for n in names))
    expected = function(**call.arguments(**call.fixed))
    for actual, wanted in zip(outputs_of(found), outputs_of(expected), strict=True):
        torch.testing.assert_close(actual, wanted, equal_nan=True)
