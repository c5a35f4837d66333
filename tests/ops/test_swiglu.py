"""Tests of swiglu beyond those of every operator, which are in test_contract.py."""

import pytest
import torch
from support import (
    DTYPES,
    assert_all_close,
    evaluate,
    every_implementation,
    floats,
    forced,
    named,
    on_device,
    on_npu,
    runner,
    twice,
)
from transformers.activations import ACT2FN

import npu_ops
from npu_ops.core import env
from npu_ops.core.compare import ROUNDED_ONCE, Tolerance, assert_close
from npu_ops.core.registry import as_if_on
from npu_ops.ops.swiglu import aclnn, op
from npu_ops.ops.swiglu.cases import TOLERANCES

IMPLEMENTATIONS = every_implementation(op.forward)
run = runner(npu_ops.swiglu, "swiglu", ("gate", "up"))


def drawn(*shape, dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draw).to(dtype) for name in ("gate", "up")}


def of_transformers(gate, up):
    return ACT2FN["silu"](gate) * up


@IMPLEMENTATIONS
def test_it_is_transformers(implementation, device):
    """Compare outputs and gradients."""
    inputs = drawn(3, 5, 48)
    expected = evaluate(of_transformers, inputs, ("gate", "up"))
    assert_all_close(run(implementation, on_device(inputs, device)), expected, twice(TOLERANCES))


@IMPLEMENTATIONS
def test_transformers_in_bfloat16(implementation, device):
    """transformers rounds silu(gate): ours may differ from it by 2 roundings, from fp64 by 1."""
    inputs = drawn(64, 128, dtype=torch.bfloat16)
    actual = run(implementation, on_device(inputs, device))["output 0"].cpu()
    one = ROUNDED_ONCE[torch.bfloat16]
    assert_close("output", actual, of_transformers(**inputs), Tolerance(2 * one.ratio, 0.02))
    assert_close("output", actual, of_transformers(**floats(inputs, torch.float64)), one)


def in_one(gate, up):
    return npu_ops.swiglu(torch.cat([gate, up], -1))


def as_views(gate, up):
    """Pass gate and up as views of one buffer, as a server's fused projection gives them."""
    width = gate.shape[-1]
    both = torch.cat([gate, up], -1)
    return npu_ops.swiglu(both[..., :width], both[..., width:])


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", DTYPES, ids=named)
@pytest.mark.parametrize("shape", [(7, 96), (2, 3, 1216), (2, 5000), (3, 1)])
def test_both_in_one_have_the_bits_of_two_tensors(shape, dtype, implementation, device):
    """A trainer with two projections and a server with a fused one get the same bits."""
    inputs = on_device(drawn(*shape, dtype=dtype), device)
    expected = run(implementation, inputs)
    with forced(implementation, "swiglu", "swiglu_backward"):
        found = [evaluate(function, inputs, ("gate", "up")) for function in (in_one, as_views)]
    for actual in found:
        if implementation == "reference":  # PyTorch's sigmoid rounds differently at a row's end
            assert_all_close(actual, expected, TOLERANCES)
        else:
            assert all(torch.equal(actual[name], value) for name, value in expected.items())


@IMPLEMENTATIONS
def test_a_token_is_computed_by_itself(implementation, device):
    """A token's bits do not depend on other tokens."""
    inputs = on_device(drawn(70, 1216, dtype=torch.bfloat16), device)
    whole = run(implementation, inputs)
    for rows in (slice(0, 1), slice(5, 22)):
        part = run(implementation, {name: x[rows] for name, x in inputs.items()})
        assert torch.equal(part["output 0"], whole["output 0"][rows])


@IMPLEMENTATIONS
def test_gates_that_are_wide_open_or_shut(implementation, device):
    """exp(-gate) may overflow to infinity; the result is then 0, without NaN."""
    gate = torch.tensor([[-1e30, -200.0, -89.0, -20.0, 0.0, 20.0, 89.0, 200.0, 1e30]])
    inputs = {"gate": gate, "up": torch.full_like(gate, 0.5)}
    expected = run("reference", floats(inputs, torch.float64))
    actual = run(implementation, on_device(inputs, device))
    for name, value in actual.items():
        torch.testing.assert_close(value.cpu(), expected[name].float(), rtol=2e-6, atol=2e-6)


def test_views_of_one_buffer_are_not_copied():
    both = torch.randn(6, 40)
    gate, up = both[:, :16], both[:, 16:32]
    laid = op.forward.lay_out(op.forward.Arguments(gate, up, torch.empty(6, 16)))
    assert [x.data_ptr() for x in laid[:2]] == [gate.data_ptr(), up.data_ptr()]


def test_backward_keeps_the_inputs_alone():
    """The backward recomputes silu(gate) instead of saving it."""
    kept = []
    inputs = [x.requires_grad_() for x in drawn(4, 8).values()]
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda x: x):
        npu_ops.swiglu(*inputs)
    assert [x.data_ptr() for x in kept] == [x.data_ptr() for x in inputs]


@pytest.mark.parametrize("grad", DTYPES, ids=named)
def test_a_gradient_of_another_dtype(grad):
    """Megatron multiplies an expert's gradient by its weight in fp32."""
    inputs = drawn(5, 24, dtype=torch.bfloat16)
    of_out = torch.randn(5, 24).to(grad)
    actual = op.backward(of_out, *inputs.values())
    expected = op.backward(of_out.double(), *floats(inputs, torch.float64).values())
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.dtype == torch.bfloat16
        assert_close("gradient", mine, theirs, TOLERANCES[torch.bfloat16])


def test_what_the_vendors_operator_takes(monkeypatch):
    monkeypatch.setattr(aclnn, "torch_npu_why_not", lambda name: None)
    gate, up = drawn(3, 8).values()

    def why_not(*given):
        with as_if_on("npu"):
            rows = npu_ops.explain("swiglu", *given)
        return next(row.why_not for row in rows if row.implementation == "aclnn")

    assert why_not(gate, up).startswith("gate and up are two tensors")
    assert why_not(gate) == "triton_ascend comes first"
    assert why_not(gate.double()) == "it has no float64 kernel"
    with env.override(consistent="tokens"):
        assert why_not(gate).startswith("NPU_OPS_CONSISTENT")


@on_npu
@pytest.mark.parametrize("dtype", DTYPES, ids=named)
def test_the_vendors_operator_is_the_reference(dtype, device):
    inputs = {"gate": torch.randn(2, 9, 96).to(dtype)}
    expected = run("reference", floats(inputs, torch.float64))
    with forced("aclnn", "swiglu", "swiglu_backward"):
        actual = run("aclnn", on_device(inputs, device))
    for name, value in actual.items():
        assert_close(name, value.cpu(), expected[name], TOLERANCES[dtype])
