"""The contract: what every op promises, tested with the CASES and CALLS of its `cases.py`.

Other files test more:

- `test_<op>.py`: what one op promises beyond the contract
- `test_every_function.py`: how functions refuse calls
- `test_defaults.py`: torch's global defaults
- `test_rewritten.py`: memory that changes without torch's notice
"""

import contextlib
import dataclasses
from unittest import mock

import pytest
import support
import torch
from calls import CALLS, differentiable
from npu_ops_tools.verify.checks import one_mask, tables
from npu_ops_tools.where import ops
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import npu_ops
from npu_ops.core import cases, env, make
from npu_ops.core.compare import Tolerance, assert_close
from npu_ops.core.registry import Table, launched_by

# Attention has its own tests. Each implementation supports only some calls, and results may be
# -inf. On CPUs, torch's kernels compute long sequences, with bits that depend on the number of
# threads. Autocast converts q, k and v as it does for torch's attention.
COMPARES_ITSELF = {"attention"}
OURS = [op for op in ops() if op not in COMPARES_ITSELF]
# Large cases of these ops are not compared with the reference here: the reference runs token by
# token, or for attention needs memory for all pairs of tokens. The ops' own tests compare with
# torch or transformers.
LARGE_BY_ITSELF = {"attention", "chunk_gated_delta_rule", "chunk_kda"}
TRAINING = [call for call in CALLS.values() if differentiable(call)]
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=str)
every_way = pytest.mark.parametrize(  # also in place, for calls that allow it
    "call, in_place",
    [
        pytest.param(call, in_place, id=f"{call}{' in place' * in_place}")
        for call in CALLS.values()
        for in_place in ([False, True] if call.in_place else [False])
    ],
)
every_training_call = pytest.mark.parametrize("call", TRAINING, ids=str)


def function_of(call):
    return getattr(npu_ops, call.function)


def results(op, function, inputs, wrt, implementation=None):
    """Return outputs, gradients and written tensors by name. `inputs` stay unchanged."""
    (writes,) = {call.writes for call in cases.of(op).CALLS if not call.in_place} or {()}
    writes = [name for name in writes if inputs.get(name) is not None]
    inputs = inputs | {name: inputs[name].clone() for name in writes}
    wrt = [name for name in wrt if inputs.get(name) is not None]
    by = support.forced(implementation, *tables(op)) if implementation else contextlib.nullcontext()
    with by, one_mask():
        found = support.evaluate(function, inputs, wrt)
    return found | {f"{name} after": inputs[name] for name in writes}


def of_case(op, case, implementation, dtype, device="cpu", wide=None):
    inputs = case.inputs(dtype, device)
    inputs = support.floats(inputs, wide) if wide else inputs
    wrt = cases.differentiable(op, case)
    return results(op, cases.function(op, case), inputs, wrt, implementation)


def compare(op, case, dtype, implementation, device, wide=torch.float64):
    expected = of_case(op, case, "reference", dtype, wide=wide)
    actual = of_case(op, case, implementation, dtype, device)
    assert actual.keys() == expected.keys()
    given = case.inputs(dtype)
    for name, value in actual.items():
        tolerance = cases.tolerance(op, name, value, dtype)
        assert_close(name, value, expected[name].to(value.device), tolerance)
        of = given.get(name.removeprefix("gradient of ").removesuffix(" after"))
        assert value.dtype == of.dtype if of is not None else value.dtype in (dtype, torch.float32)


# Results, compared with the reference


def chosen(large):
    """Yield (op, case, implementation, device) as pytest parameters."""
    for op in ops():
        if op in (LARGE_BY_ITSELF if large else COMPARES_ITSELF):
            continue
        for case in cases.of(op).CASES:
            if case.large != large:
                continue
            for one in [("cpu", "cpu")] if large else support.implementations(Table.tables[op]):
                values, marks = (one, ()) if large else (one.values, one.marks)
                name = f"{op}-{case.name}-{'-'.join(values)}"
                yield pytest.param(op, case, *values, id=name, marks=marks)


@pytest.mark.parametrize("dtype", support.DTYPES, ids=support.named)
@pytest.mark.parametrize("op, case, implementation, device", chosen(large=False))
def test_an_implementation_is_the_reference(op, case, implementation, device, dtype):
    """The reference runs in fp64 on the same rounded inputs. Written tensors are compared too."""
    compare(op, case, dtype, implementation, device)


@pytest.mark.slow
@pytest.mark.parametrize("op, case, implementation, device", chosen(large=True))
def test_at_full_size(op, case, implementation, device):
    compare(op, case, torch.bfloat16, implementation, device, torch.float32)


@pytest.mark.parametrize("op", OURS)
def test_threads_change_nothing(op):
    """Uses the largest of the small cases, so that the work is split among threads."""
    small = [case for case in cases.of(op).CASES if not case.large]

    def size(case):
        return max(x.numel() for x in case.inputs(torch.float32).values() if hasattr(x, "numel"))

    case = max(small, key=size)
    support.assert_threads_change_nothing(lambda: of_case(op, case, None, torch.float32))


@every_call
def test_what_no_kernel_writes_is_nan(call):
    """In tests, outputs are NaN before a kernel runs, so that an element that it skips shows."""
    with launched_by(lambda table, chosen, args: None):
        outputs = function_of(call)(**call.arguments())
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    assert all(out.isnan().all() for out in outputs if out is not None)


@pytest.mark.parametrize("op", ops())
def test_a_call_without_tokens_launches_no_kernel(op):
    """A launch with 0 programs is an error on an NPU. Tests each function of an op."""
    launched = []
    for case in {cases.function(op, case): case for case in cases.of(op).CASES}.values():
        empty = dataclasses.replace(case, tokens=0, large=False)
        with launched_by(lambda table, chosen, arguments: launched.append(table.op)):
            results(op, cases.function(op, case), empty.inputs(torch.float32), ())
    assert not launched


def of_options():
    """Yield (op, option, implementation, device) as pytest parameters."""
    for op in ops():
        for option in getattr(cases.of(op), "OPTIONS", []):
            for one in support.implementations(Table.tables[op]):
                name = f"{option}-{'-'.join(one.values)}"
                yield pytest.param(op, option, *one.values, id=name, marks=one.marks)


@pytest.mark.parametrize("op, option, implementation, device", of_options())
def test_an_option_takes_effect_and_agrees_with_the_reference(op, option, implementation, device):
    """Results, gradients or written tensors change, unless the option is declared to change
    nothing."""
    call = CALLS[option.call]

    def run(change, implementation, device, wide=None):
        arguments = cases.changed(cases.changed(call.arguments(), option.given), change)
        arguments = (
            support.floats(arguments, wide) if wide else support.on_device(arguments, device)
        )
        trains = option.trains and call.differentiable is None
        wrt = [n for n in cases.of(op).DIFFERENTIABLE if isinstance(arguments.get(n), torch.Tensor)]
        try:
            return results(op, function_of(call), arguments, wrt if trains else (), implementation)
        except RuntimeError as declined:
            if not str(declined).startswith("NPU_OPS_IMPL forces"):
                raise
            return results(op, function_of(call), arguments, wrt if trains else ())

    actual = run(option.change, implementation, device)
    expected = run(option.change, "reference", "cpu", torch.float64)
    before = run({}, implementation, device)
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        one = cases.tolerance(op, name, value, torch.float32)
        tolerance = Tolerance(2 * one.ratio, 2 * one.max_abs)
        assert_close(name, value, expected[name].to(value.device), tolerance)
    assert same_results(actual, before) == option.same


def same_results(some, others):
    """Return whether names, dtypes and shapes agree, and values up to the order of additions."""
    return some.keys() == others.keys() and all(
        value.dtype == others[name].dtype and value.shape == others[name].shape
        and torch.allclose(value, others[name], rtol=1e-4, atol=1e-5)
        for name, value in some.items()
    )  # fmt: skip


# Ops whose `initial_state` must be fp32.
FP32_STATES = {"chunk_gated_delta_rule", "chunk_kda", "fused_recurrent_gated_delta_rule"}
# Ops that round one result and compute another from the rounded one; see test_rms_norm.py.
ROUNDS_BETWEEN = {"add_rms_norm"}


def with_and_without_options():
    """Yield (op, call, changes, whether gradients exist) for each call, and for each option."""
    for op in OURS:
        for call in cases.of(op).CALLS:
            if call.function not in ROUNDS_BETWEEN:
                yield pytest.param(op, call, (), True, id=str(call))
        for one in getattr(cases.of(op), "OPTIONS", []):
            if one.call not in ROUNDS_BETWEEN:
                changes = one.given, one.change
                yield pytest.param(op, CALLS[one.call], changes, one.trains, id=str(one))


@pytest.mark.parametrize("op, call, changes, trains", with_and_without_options())
def test_the_reference_rounds_results_alone(op, call, changes, trains):
    """Results for bf16 inputs are those for the same numbers in fp32, rounded once."""
    arguments = call.arguments(**call.fixed)
    for change in changes:
        arguments = cases.changed(arguments, change)
    narrow = support.floats(arguments, torch.bfloat16)
    if op in FP32_STATES:
        narrow["initial_state"] = arguments.get("initial_state")
    wrt = differentiable(call) if trains else ()
    actual, expected = (
        results(op, function_of(call), inputs, wrt, "reference")
        for inputs in (narrow, support.floats(narrow, torch.float32))
    )
    for name, value in actual.items():
        assert torch.equal(value, expected[name].to(value.dtype)), name


class Dtypes(TorchDispatchMode):
    """Records the dtypes of all tensors that torch operators return."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        found = out if isinstance(out, (tuple, list)) else (out,)
        self.seen |= {x.dtype for x in found if isinstance(x, torch.Tensor)}
        return out


@pytest.mark.parametrize("call", [c for op in OURS for c in cases.of(op).CALLS], ids=str)
def test_the_reference_computes_in_fp64_for_fp64_alone(call):
    (op,) = (op for op in ops() if call in cases.of(op).CALLS)
    launch, dtypes = Table.launch, Dtypes()

    def watched(table, chosen, arguments):
        """Enter the dispatch mode inside our operator, to see the torch operators that it calls."""
        with dtypes:
            launch(table, chosen, arguments)

    with launched_by(watched):
        arguments = call.arguments(**call.fixed)
        results(op, function_of(call), arguments, differentiable(call), "reference")
    assert torch.float32 in dtypes.seen and torch.float64 not in dtypes.seen


@pytest.mark.parametrize("op, call, changes, trains", with_and_without_options())
def test_the_reference_makes_tensors_where_its_arguments_are(op, call, changes, trains):
    """Inside a kernel the default device is meta, so a tensor made without a device would show."""
    launch, counted = Table.launch, make.counted

    def placed(*span, device):
        return counted(*span, device=device)

    def watched(table, chosen, arguments):
        with mock.patch.object(make, "counted", placed), torch.device("meta"):
            launch(table, chosen, arguments)

    def run():
        arguments = call.arguments(**call.fixed)
        for change in changes:
            arguments = cases.changed(arguments, change)
        wrt = differentiable(call) if trains else ()
        return results(op, function_of(call), arguments, wrt, "reference")

    expected = run()
    with launched_by(watched):
        actual = run()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


# Layouts


def inside(x):
    """Return x as the middle of a wider tensor, whose other elements are NaN."""
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 7), float("nan"))
    wide[..., 3:-4] = x
    return wide[..., 3:-4]


def columns(x):
    """Return x with its last dimension strided in memory."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def every_second(x):
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"))
    wide[..., ::2] = x
    return wide[..., ::2]


def repeated(x):
    """Return x with one copy in memory for its whole first dimension."""
    return x[:1].expand(x.shape) if x.dim() > 1 else x


FORMS = pytest.mark.parametrize("form", [inside, columns, every_second, repeated])


def dense(x):
    return x.clone(memory_format=torch.contiguous_format) if isinstance(x, torch.Tensor) else x


def in_form(call, form):
    """Return the call's arguments; `form` changes the strides of those that are not written to."""
    arguments = call.arguments(**call.fixed)
    chosen = [n for n in call.tensors() if call.in_place or n not in call.writes]
    chosen = [name for name in chosen if arguments[name].is_floating_point()]
    return arguments | {name: form(arguments[name]) for name in chosen}


@FORMS
@every_call
def test_strides_change_nothing(call, form):
    """Results, gradients and writes are the same for any strides; inputs stay unchanged."""
    (op,) = (op for op in ops() if call in cases.of(op).CALLS)

    def run(laid):
        return results(op, function_of(call), laid, differentiable(call))

    laid = in_form(call, form)
    before = {name: dense(value) for name, value in laid.items()}
    actual = run(laid)
    for name, value in run(before).items():
        torch.testing.assert_close(actual[name], value, rtol=2e-5, atol=2e-5)
    for name in call.tensors():
        assert name in call.writes or torch.equal(laid[name], before[name])


@FORMS
@every_training_call
def test_strides_of_gradients_change_nothing(call, form):
    wrt, arguments = differentiable(call), call.arguments(**call.fixed)
    leaves = [arguments[name].requires_grad_() for name in wrt]
    outputs = function_of(call)(**arguments)
    outputs = [x for x in (outputs if isinstance(outputs, tuple) else (outputs,)) if x is not None]
    grads = [form(torch.randn(x.shape)) for x in outputs]
    strided = torch.autograd.grad(outputs, leaves, grads, retain_graph=True)
    contiguous = torch.autograd.grad(outputs, leaves, [dense(grad) for grad in grads])
    for one, other in zip(strided, contiguous, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


# The gradient


@every_training_call
def test_gradcheck(call):
    wrt = differentiable(call)
    arguments = support.floats(call.arguments(**call.fixed), torch.float64)
    function, leaves = support.function_of_leaves(function_of(call), arguments, wrt)
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


@every_training_call
def test_each_gradient_alone(call):
    """A gradient computed alone equals the one computed together with all others."""
    wrt, arguments = differentiable(call), call.arguments(**call.fixed)
    every = support.evaluate(function_of(call), arguments, wrt)
    for name in wrt:
        alone = support.evaluate(function_of(call), arguments, (name,))
        key = f"gradient of {name}"
        torch.testing.assert_close(alone[key], every[key], rtol=1e-6, atol=1e-6)


# For an operator without an autograd kernel torch only warns and leaves the gradient out.
@pytest.mark.filterwarnings("error:.*an autograd kernel was not registered")
@every_training_call
def test_a_second_derivative_is_right_or_refused(call):
    wrt = differentiable(call)
    arguments = support.floats(call.arguments(**call.fixed), torch.float64)
    function, leaves = support.function_of_leaves(function_of(call), arguments, wrt)
    try:
        assert torch.autograd.gradgradcheck(lambda *x: function(*x)[0], leaves, fast_mode=True)
    except NotImplementedError as refused:
        assert ": got a gradient of its gradient, " in str(refused)


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
@every_training_call
def test_checkpointing_changes_nothing(call, use_reentrant):
    wrt, arguments = differentiable(call), call.arguments()

    def block(*leaves):
        torch.manual_seed(0)
        outputs = function_of(call)(**arguments | dict(zip(wrt, leaves, strict=True)))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return torch.cat([x.sin().flatten() for x in outputs if x is not None])

    support.assert_checkpointing_changes_nothing(block, [arguments[n] for n in wrt], use_reentrant)


# Support for torch.compile, autograd and other features of torch


def copied(args, leaves):
    return tuple(
        x.detach().clone().requires_grad_(leaves and x.requires_grad)
        if isinstance(x, torch.Tensor) else x
        for x in args
    )  # fmt: skip


def of_the_dtype(op):
    """Return the names of the arguments that have a case's dtype; other floats are always fp32."""
    small = [case.inputs(torch.bfloat16) for case in cases.of(op).CASES if not case.large]
    return {n for x in small for n, value in x.items() if _dtype(value) == torch.bfloat16}


def _dtype(value):
    return getattr(value[0] if isinstance(value, tuple) else value, "dtype", None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=support.named)
@every_way
def test_opcheck(call, in_place, dtype):
    """Checks every operator that the call dispatches, including the gradients'."""
    (op,) = (op for op in ops() if call in cases.of(op).CALLS)
    wrt = [] if in_place else differentiable(call)
    arguments = call.arguments(in_place)
    arguments |= support.floats({n: arguments[n] for n in of_the_dtype(op) & {*arguments}}, dtype)
    with support.DispatchRecorder() as recorded:
        support.evaluate(function_of(call), arguments, wrt)
    assert recorded.calls and (not wrt or len(recorded.calls) > 1)
    for n, (operator, args) in enumerate(recorded.calls):
        torch.library.opcheck(operator, copied(args, leaves=n == 0))


@FORMS
@every_call
def test_fake_is_like_real(call, form):
    """Results and gradients have the shapes, strides and dtypes of real ones."""
    laid = in_form(call, form)
    tensors, wrt = [n for n in call.tensors() if laid[n].is_floating_point()], differentiable(call)
    others = [n for n in call.tensors() if n not in tensors]

    def function(*values):
        given = laid | dict(zip([*tensors, *others], values, strict=True))
        given |= {name: given[name].detach().requires_grad_() for name in wrt}
        outputs = function_of(call)(**given)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        outputs = [x for x in outputs if x is not None]
        if not wrt:
            return outputs
        ones = [torch.ones_like(x) for x in outputs]
        return *outputs, *torch.autograd.grad(outputs, [given[n] for n in wrt], ones)

    support.assert_fake_is_like_real(function, *(laid[name] for name in [*tensors, *others]))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@every_call
def test_compiled_is_eager(call, backend):
    """Compiled to one graph, outputs and gradients are those of eager mode."""
    wrt = differentiable(call)

    def function(**arguments):
        arguments = arguments | {name: arguments[name] * 2 for name in wrt}
        outputs = function_of(call)(**arguments)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return tuple(x.cos() for x in outputs if x is not None)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    arguments = call.arguments(**call.fixed)
    actual = support.evaluate(compiled, {n: dense(x) for n, x in arguments.items()}, wrt)
    torch._dynamo.reset()
    for name, value in support.evaluate(function, arguments, wrt).items():
        assert_close(name, actual[name], value, Tolerance(1e-6, 2e-6))


def one_of_few(op):
    """Return three calls whose cases differ only in the number of tokens."""
    case = next(case for case in cases.of(op).CASES if case.name in cases.of(op).REPRESENTATIVE)
    return [dataclasses.replace(case, tokens=tokens, large=False) for tokens in (7, 12, 19)]


@pytest.mark.parametrize("op", ops())
def test_one_compilation_serves_all_lengths(op):
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    frames = []
    for case in one_of_few(op):
        function = cases.function(op, case)
        compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
        inputs = case.inputs(torch.float32) | cases.of(op).CALLS[0].fixed
        expected = function(**{n: dense(x) for n, x in inputs.items()})
        actual = compiled(**inputs)
        for one, other in zip(outputs_of(actual), outputs_of(expected), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        frames.append(counter.frame_count)
    torch._dynamo.reset()
    assert len(set(frames)) == 1, "compiled again for another length"


def outputs_of(value):
    return [x for x in (value if isinstance(value, tuple) else (value,)) if x is not None]


@pytest.mark.parametrize("call", [c for op in OURS for c in cases.of(op).CALLS], ids=str)
def test_autocast_changes_nothing(call):
    """Autocast must not change the dtype in which an op computes."""
    (op,) = (op for op in ops() if call in cases.of(op).CALLS)
    given = op, function_of(call), call.arguments(**call.fixed), differentiable(call)
    expected = results(*given)
    with torch.autocast("cpu", torch.bfloat16):
        actual = results(*given)
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype and torch.equal(actual[name], value), name


# Which implementation runs


@every_call
def test_explain_names_what_runs(call):
    def runs(arguments):
        rows = npu_ops.explain(call.function, **arguments)
        (cpu,) = (row.why_not for row in rows if row.implementation == "cpu")
        return [row.implementation for row in rows if row.why_not is None], cpu

    assert runs(call.arguments(**call.fixed)) == (["cpu"], None)
    chosen, why_not = runs(support.floats(call.arguments(**call.fixed), torch.float64))
    assert chosen == ["reference"] and "float64" in why_not


@every_call
def test_on_a_cpu_a_kernel_runs_and_strict_mode_is_content(call):
    with env.override(strict=True):
        function_of(call)(**call.arguments())
