"""Helpers for the tests of all ops."""

from __future__ import annotations

import contextlib
import functools
import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from npu_ops.core import ascendc, env
from npu_ops.core.compare import Tolerance, assert_close
from npu_ops.core.registry import as_if_on, explain

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def mixed_dtypes():
    """Return all combinations of dtypes for four arguments, as pytest parameters.

    Nine of them run in `make test`: for any two arguments these contain every pair of dtypes (an
    orthogonal array, Taguchi's L9). The others run in `make test-all`.
    """
    chosen = [
        (i, j, (i + j) % 3, (i + 2 * j) % 3) for i, j in itertools.product(range(3), repeat=2)
    ]
    return [
        pytest.param(*(DTYPES[i] for i in row), marks=() if row in chosen else pytest.mark.slow)
        for row in itertools.product(range(3), repeat=4)
    ]


def often(values, chosen, name=str) -> list:
    """Return `values` as pytest parameters with `name(value)` as ids; all but `chosen` are slow."""
    return [
        pytest.param(x, id=name(x), marks=() if name(x) in chosen else pytest.mark.slow)
        for x in values
    ]


def on_device(inputs, device):
    """Return the arguments with each tensor moved to a device."""
    return {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def devices() -> list[str]:
    """Return the available device types."""
    accelerators = [
        d for d in ("cuda", "npu") if hasattr(torch, d) and getattr(torch, d).is_available()
    ]
    return ["cpu", *accelerators]


def implementations(table) -> list:
    """Return (name, device) of each implementation of an op that runs on an available device.

    An implementation by the vendor's operators is left out unless it comes first: behind our own
    kernels it takes few calls. `test_*_aclnn.py` and `test_fla_npu.py` test these.
    """
    return [
        pytest.param(
            implementation.name,
            device,
            id=f"{implementation.name}-{device}",
            marks=_skipped(implementation.name, table.op, device),
        )
        for device in devices()
        for place, implementation in enumerate(table.implementations)
        if device in (implementation.devices or {"cpu"})
        if implementation.name not in ("aclnn", "fla_npu") or place == 0
    ]


def every_implementation(operator):
    """Parametrize a test with each implementation of an operator, and its device."""
    return pytest.mark.parametrize("implementation, device", implementations(operator.table))


def runner(function, op: str, names: tuple[str, ...]):
    """Return `run(implementation, inputs, wrt)`: outputs and gradients by one implementation.

    It skips names in `wrt` whose input is None or missing.
    """

    def run(implementation, inputs, wrt=names):
        with forced(implementation, op):
            return evaluate(function, inputs, [n for n in wrt if inputs.get(n) is not None])

    return run


def on_npu(test):
    """Parametrize a test with the device "npu". Without an NPU, return None, which is no test."""
    return pytest.mark.parametrize("device", ["npu"])(test) if "npu" in devices() else None


def declined_by_vendor(aclnn, op: str, function, given: dict, monkeypatch) -> str | None:
    """Return why an op's `aclnn` implementation declines `function(**given)`, None if it takes it.

    The call is explained as if on an NPU with torch_npu.
    """
    monkeypatch.setattr(aclnn, "_missing", lambda: None)
    with as_if_on("npu"), forced("aclnn", op):
        verdicts = explain(function, **given)
    return next(v.why_not for v in verdicts if v.implementation == "aclnn")


def _skipped(implementation: str, op: str, device: str) -> list:
    """Return a skip mark for AscendC kernels if nothing here can run them, else an empty list."""
    if implementation != "ascendc":
        return []
    why_not = ascendc.why_not(op.removesuffix("_backward"), torch.device(device, 0))
    return [pytest.mark.skip(reason=why_not)] if why_not else []


def parametrize_cases(cases, *, large: bool):
    """Parametrize a test with the small cases, or with the large ones for `make test-all`."""
    chosen = [case for case in cases if case.large == large]
    return pytest.mark.parametrize("case", chosen, ids=lambda case: case.name)


def parametrize_dtypes(*extra: torch.dtype):
    return pytest.mark.parametrize("dtype", (*DTYPES, *extra), ids=named)


@contextlib.contextmanager
def forced(implementation: str, *ops: str):
    """Force one implementation for `ops` within the block."""
    with env.override(impl=dict.fromkeys(ops, implementation)):
        yield


@contextlib.contextmanager
def threads(number: int):
    """Run CPU kernels on this number of threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Copies:
    """Result of `copies`: names of the aten operators that copied, and bytes allocated."""

    operators: list[str]
    allocated: int


@contextlib.contextmanager
def copies():
    """Record which operators copy tensors within the block, and how much memory is allocated."""
    seen = Copies()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        yield seen
    events = profile.events()
    copying = ("aten::copy_", "aten::clone", "aten::contiguous", "aten::_to_copy", "aten::cat")
    seen.operators = [event.name for event in events if event.name in copying]
    seen.allocated = sum(max(0, e.self_cpu_memory_usage) for e in events)


class DispatchRecorder(TorchDispatchMode):
    """Records each npu_ops operator that is called, with its positional arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "npu_ops":
            self.calls.append((function, args))
        return function(*args, **(kwargs or {}))


def floats(inputs: dict, dtype: torch.dtype) -> dict:
    """Return `inputs` with every floating tensor converted to `dtype`, also those in a tuple."""

    def convert(value):
        if isinstance(value, tuple):
            return tuple(map(convert, value))
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if floating else value

    return {name: convert(value) for name, value in inputs.items()}


def exact(like: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Draw random multiples of 1/16 in [-4, 4], which bf16, fp16 and fp32 all represent exactly."""
    draw = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-64, 65, like.shape, generator=draw, dtype=torch.float32, device="cpu")
    return (drawn / 16).to(like)


def evaluate(function, inputs: dict, wrt: tuple[str, ...], grad_seed: int = 7) -> dict:
    """Return the outputs of `function(**inputs)` and the gradients of the inputs `wrt`, by name."""
    inputs = {
        k: v.detach().requires_grad_() if k in wrt and v is not None else v
        for k, v in inputs.items()
    }
    leaves = {name: inputs[name] for name in wrt if inputs[name] is not None}
    outputs = function(**inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    outputs = {f"output {i}": out for i, out in enumerate(outputs) if out is not None}
    if not leaves:
        return outputs
    grads = torch.autograd.grad(
        list(outputs.values()), list(leaves.values()),
        [exact(out, grad_seed + i) for i, out in enumerate(outputs.values())],
    )  # fmt: skip
    return outputs | {f"gradient of {name}": g for name, g in zip(leaves, grads, strict=True)}


def twice(tolerances: dict) -> dict:
    """Double the tolerances, for an expectation that is rounded itself or uses rounded tables."""
    return {d: Tolerance(2 * t.ratio, 2 * t.max_abs) for d, t in tolerances.items()}


def assert_all_close(
    actual: dict, expected: dict, tolerances: dict, special: dict | None = None
) -> None:
    """Compare by name, with the tolerance of each dtype; `special` has others for some names."""
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        by_dtype = (special or {}).get(name, tolerances)
        assert_close(name, value, expected[name].to(value.device), by_dtype[value.dtype])


def assert_same_bits(actual: dict, expected: dict) -> None:
    """Check that each tensor of `actual` equals, bit for bit, its namesake in `expected`."""
    for name, value in actual.items():
        assert torch.equal(value, expected[name]), name


def assert_threads_change_nothing(step) -> None:
    """Check that the tensors of `step()` have the same bits on one, two and three threads."""
    found = []
    for number in (1, 2, 3):
        with threads(number):
            found.append(step())
    for other in found[1:]:
        assert_same_bits(other, found[0])


def function_of_leaves(function, inputs: dict, names: tuple[str, ...]):
    """Return `function(**inputs)` as a function of the inputs `names` alone, and those as leaves.

    Inputs and outputs that are None are left out.
    """
    names = [name for name in names if inputs.get(name) is not None]

    def call(*leaves):
        outputs = function(**inputs | dict(zip(names, leaves, strict=True)))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return tuple(out for out in outputs if out is not None)

    return call, [inputs[name].detach().clone().requires_grad_() for name in names]


def with_gradients(function):
    """Return a function that computes the outputs of `function` and its arguments' gradients."""

    def outputs_and_gradients(*tensors):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        ones = [torch.ones_like(out) for out in outputs]
        return *outputs, *torch.autograd.grad(outputs, leaves, ones)

    return outputs_and_gradients


def assert_fake_is_like_real(function, *tensors: torch.Tensor) -> None:
    """Check that FakeTensorMode gives the shapes, strides and dtypes of real results."""
    mode = FakeTensorMode()
    with mode:
        fake = function(*map(mode.from_tensor, tensors))
    for actual, expected in zip(fake, function(*tensors), strict=True):
        assert actual.dtype == expected.dtype
        assert actual.shape == expected.shape and actual.stride() == expected.stride()


def assert_compiled_is_eager(function, tensors, backend: str) -> None:
    """Check that compiling to one graph keeps the outputs and gradients of eager mode."""
    results = []
    for call in (function, torch.compile(function, fullgraph=True, backend=backend)):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        outputs = call(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        grads = [exact(out, seed) for seed, out in enumerate(outputs)]
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, grads)])
    torch._dynamo.reset()
    for actual, expected in zip(*results[::-1], strict=True):
        torch.testing.assert_close(actual, expected)


def assert_compiled_in_place_is_eager(call, q, k) -> None:
    """Check that the compiled `call(q, k, inplace=True)` writes the results of `call(q, k)`."""
    expected = call(q, k)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def function(q, k):
        call(q, k, inplace=True)
        return q + 1

    out = function(q, k)
    torch._dynamo.reset()
    assert torch.equal(q, expected[0]) and torch.equal(k, expected[1]) and torch.equal(out, q + 1)


def assert_checkpointing_changes_nothing(block, tensors, use_reentrant: bool) -> None:
    """Check that checkpointing activations of a block with one output keeps the gradients' bits."""

    def step(block):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        block(*leaves).sum().backward()
        return [leaf.grad for leaf in leaves]

    again = step(functools.partial(checkpoint, block, use_reentrant=use_reentrant))
    for actual, expected in zip(again, step(block), strict=True):
        assert torch.equal(actual, expected)


def train_step(model, **inputs) -> dict:
    """Return the outputs and every gradient of one step of a transformers model, by name."""
    model.zero_grad()
    out = model(**inputs)
    out = out.logits if "logits" in out else out.last_hidden_state
    (out * exact(out)).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"output": out.detach()} | {name: grad.clone() for name, grad in gradients.items()}


def assert_same_steps(actual: dict, expected: dict) -> None:
    """Check that two steps of one model agree up to the order of fp32 additions."""
    assert actual.keys() == expected.keys() and len(expected) > 10
    for name, value in actual.items():
        assert_close(name, value, expected[name], Tolerance(ratio=1e-5, max_abs=1e-5))
