"""Both gated delta rules, chunked and recurrent: against transformers, and their properties."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import delta_rule_calls
import pytest
import support
import torch
from delta_rule_calls import BY_TOKEN, assert_flags_are_what_they_say, hugging_face
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

import npu_ops
from npu_ops.core import cases
from npu_ops.core.compare import Tolerance, assert_close
from npu_ops.core.registry import Table, launched_by


class Rule(NamedTuple):
    """A delta rule and its few test shapes, each of which needs a compilation."""

    op: str
    keys: int
    values: int
    tokens: int
    cuts: Sequence[int]
    starts: Sequence[int]
    close: Tolerance
    settings: dict

    def __call__(self, **inputs):
        return getattr(npu_ops, self.op)(**inputs)

    def qkv(self, batch=1, tokens=None, heads=1, value_heads=2):
        size = batch, tokens or self.tokens, heads, value_heads, self.keys, self.values
        return delta_rule_calls.qkv(*size) | self.settings

    def run(self, implementation, inputs):
        return support.runner(self, self.op, cases.of(self.op).DIFFERENTIABLE)(
            implementation, inputs
        )


CHUNK = Rule(
    "chunk_gated_delta_rule", 16, 24, 40, (1, 16, 39), (0, 0, 3, 3, 35, 36, 52, 52),
    Tolerance(2e-6, 2e-6), {"chunk_size": 16},
)  # fmt: skip
RECURRENT = Rule(
    "fused_recurrent_gated_delta_rule", 8, 6, 9, (1, 4, 8), (0, 0, 3, 3, 8, 9, 9),
    Tolerance(1e-6, 1e-6), {},
)  # fmt: skip
RULES = pytest.mark.parametrize("rule", [CHUNK, RECURRENT], ids=lambda rule: rule.op)
IMPLEMENTATIONS = pytest.mark.parametrize(
    "rule, implementation, device",
    [
        pytest.param(rule, *one.values, id=f"{rule.op}-{one.id}", marks=one.marks)
        for rule in (CHUNK, RECURRENT)
        for one in support.implementations(Table.tables[rule.op])
    ],
)


def fp32(rule):
    return cases.of(rule.op).TOLERANCES[torch.float32]


@RULES
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 150])
@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_against_transformers(form, tokens, rule):
    """Compare outputs and gradients, including the gradient from the final state."""
    theirs = getattr(qwen3_5, f"torch_{form}_gated_delta_rule").__wrapped__
    inputs = rule.qkv(2, tokens, 2, 4)
    wrt = (*BY_TOKEN, "initial_state")
    expected = support.evaluate(functools.partial(hugging_face, theirs), inputs, wrt)
    settings = {"use_qk_l2norm_in_kernel": True}
    settings |= {"chunk_size": 64} if rule is CHUNK else {}
    actual = support.evaluate(rule, inputs | settings, wrt)
    support.assert_all_close(actual, expected, {torch.float32: Tolerance(2e-5, 2e-5)})


@IMPLEMENTATIONS
@pytest.mark.parametrize("place", [0, 1, 2])
def test_two_parts_are_the_whole(place, rule, implementation, device):
    inputs = support.on_device(rule.qkv(2), device)
    cut = rule.cuts[place]
    with support.forced(implementation, rule.op):
        whole, final = rule(**inputs)
        one, state = rule(**inputs | {n: inputs[n][:, :cut] for n in BY_TOKEN})
        rest = {n: inputs[n][:, cut:] for n in BY_TOKEN}
        two, last = rule(**inputs | rest | {"initial_state": state})
    assert_close("o", torch.cat([one, two], 1), whole, rule.close)
    assert_close("state", last, final, rule.close)


@IMPLEMENTATIONS
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=support.named)
def test_packed_is_one_by_one(index, rule, implementation, device):
    """Empty sequences pass their state on, and its gradient back."""
    starts, close = rule.starts, fp32(rule)
    inputs = rule.qkv(1, starts[-1])
    inputs["initial_state"] = torch.randn(len(starts) - 1, 2, rule.keys, rule.values)
    inputs["cu_seqlens"] = torch.tensor(starts, dtype=index)
    found = rule.run(implementation, support.on_device(inputs, device))
    actual = {name: x.cpu() for name, x in found.items()}
    grad_o, grad_state = support.exact(actual["output 0"], 7), support.exact(actual["output 1"], 8)
    for n, (begin, end) in enumerate(zip(starts, starts[1:], strict=False)):
        if begin == end:
            assert torch.equal(actual["output 1"][n], inputs["initial_state"][n])
            assert torch.equal(actual["gradient of initial_state"][n], grad_state[n])
            continue
        alone = {name: inputs[name][:, begin:end].clone().requires_grad_() for name in BY_TOKEN}
        state = inputs["initial_state"][n : n + 1].clone().requires_grad_()
        with support.forced("reference", rule.op):
            o, final = rule(**alone, initial_state=state, output_final_state=True)
            grads = torch.autograd.grad(
                (o, final), (*alone.values(), state), (grad_o[:, begin:end], grad_state[n : n + 1])
            )
        assert_close("o", actual["output 0"][:, begin:end], o, close)
        assert_close("state", actual["output 1"][n : n + 1], final, close)
        for name, grad in zip(BY_TOKEN, grads, strict=False):
            assert_close(name, actual[f"gradient of {name}"][:, begin:end], grad, close)
        assert_close("dh0", actual["gradient of initial_state"][n : n + 1], grads[-1], close)


@RULES
def test_flags_are_what_they_say(rule):
    assert_flags_are_what_they_say(rule, rule.qkv(), rule.close)


@RULES
def test_no_final_state_unless_wanted(rule):
    inputs = rule.qkv() | {"output_final_state": False}
    o, final = rule(**inputs)
    assert final is None and torch.equal(o, rule(**inputs | {"output_final_state": True})[0])


@RULES
def test_a_final_state_that_nobody_wants_takes_no_memory(rule):
    """Final states are as large as the whole batch of initial ones."""
    states = []
    with launched_by(lambda table, chosen, arguments: states.append(arguments[-1])):
        for wanted in (False, True):
            rule(**rule.qkv() | {"output_final_state": wanted})
    assert states[0] is None and states[1] is not None


@IMPLEMENTATIONS
def test_strided_inputs(rule, implementation, device):
    inputs = support.on_device(rule.qkv(2, 21 if rule is CHUNK else 5), device)
    strided = inputs | {
        name: inputs[name].transpose(0, 1).contiguous().transpose(0, 1)
        for name in (*BY_TOKEN, "initial_state")
    }
    expected = rule.run(implementation, inputs)
    support.assert_same_bits(rule.run(implementation, strided), expected)


@IMPLEMENTATIONS
def test_the_same_each_time(rule, implementation, device):
    rule = rule if rule is CHUNK else rule._replace(tokens=20, values=70)
    inputs = support.on_device(rule.qkv(2, None, 2, 4), device)
    support.assert_threads_change_nothing(lambda: rule.run(implementation, inputs))


@IMPLEMENTATIONS
@pytest.mark.parametrize("gate", [-80.0, -1e4, float("-inf")])
def test_a_decay_to_nothing(gate, rule, implementation, device):
    """The old state vanishes without NaN: each token reads only what it wrote."""
    inputs = rule.qkv() | {"scale": 1.0}
    inputs["g"] = torch.full_like(inputs["g"], gate)
    actual = rule.run(implementation, support.on_device(inputs, device))
    assert all(value.isfinite().all() for value in actual.values())
    match = (inputs["q"] * inputs["k"]).sum(-1, keepdim=True)
    expected = match * inputs["beta"][..., None] * inputs["v"]
    assert_close("o", actual["output 0"].cpu(), expected, Tolerance(1e-6, 1e-6))
    left = actual["gradient of g"].abs().max()
    assert left < 1e-25 if rule is CHUNK else left == 0 or gate == -80.0


# Support for torch.compile, autograd and other features of torch


def of_cases(chunk, recurrent):
    """Parametrize a test with the named cases of the two rules."""
    return pytest.mark.parametrize(
        "rule, case",
        [
            pytest.param(rule, case, id=f"{rule.op}-{case.name}")
            for rule, names in ((CHUNK, chunk), (RECURRENT, recurrent))
            for case in cases.of(rule.op).CASES
            if case.name in names
        ],
    )


@of_cases(("packed", "no-state"), ("packed-v-first", "all-gates", "key-gate", "flags", "one-key"))
def test_gradcheck(rule, case):
    """Checks the reference's gradients on 6 tokens. Kernels are compared with the reference."""
    inputs = support.floats(case.inputs(torch.float64), torch.float64)
    inputs |= {n: inputs[n][:, :6] for n in (*BY_TOKEN, "gk", "gv") if inputs.get(n) is not None}
    if inputs["cu_seqlens"] is not None:
        inputs["cu_seqlens"] = inputs["cu_seqlens"].clamp(max=6)
    names = cases.differentiable(rule.op, case)
    assert torch.autograd.gradcheck(
        *support.function_of_leaves(rule, inputs, names), fast_mode=True
    )


@of_cases(("packed", "no-state"), ("packed-v-first", "dense"))
def test_compile(rule, case):
    """Compiled to one graph, forward and backward equal eager mode."""
    names = cases.differentiable(rule.op, case)
    function, leaves = support.function_of_leaves(rule, case.inputs(torch.float32), names)
    support.assert_compiled_is_eager(function, leaves, "aot_eager")


@of_cases(("packed", "no-state", "empty"), ("packed", "all-gates-v-first", "no-gates"))
def test_fake_is_like_real(rule, case):
    """Results and gradients have the shapes, strides and dtypes of real ones."""
    inputs = case.inputs(torch.bfloat16)
    wrt = [n for n in cases.differentiable(rule.op, case) if inputs[n] is not None]
    tensors = [name for name, x in inputs.items() if isinstance(x, torch.Tensor)]

    def function(*values):
        given = inputs | dict(zip(tensors, values, strict=True))
        return support.evaluate(rule, given, wrt).values()

    support.assert_fake_is_like_real(function, *(inputs[name] for name in tensors))
