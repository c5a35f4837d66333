"""rms_norm and add_rms_norm: what they promise beyond the contract in test_contract.py."""

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
    runner,
    twice,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

import npu_ops
from npu_ops.core.compare import ROUNDED_ONCE, Tolerance, assert_close
from npu_ops.ops.rms_norm import op
from npu_ops.ops.rms_norm.cases import TOLERANCES

IMPLEMENTATIONS = every_implementation(op.forward)
OF_SUMS = every_implementation(op.add_forward)
SUMMED = ("x", "residual", "weight")
run = runner(npu_ops.rms_norm, "rms_norm", ("x", "weight"))
run_add = runner(npu_ops.add_rms_norm, "add_rms_norm", SUMMED)
MODULES = [(Qwen3RMSNorm, False), (Qwen3NextRMSNorm, True)]


def drawn(*shape, dtype=torch.float32, zero_centered=False):
    weight = torch.randn(shape[-1]) / 4 + (not zero_centered)
    given = {"x": torch.randn(shape).to(dtype), "weight": weight.to(dtype)}
    return given | {"zero_centered": zero_centered}


def of_module(module):
    """Wrap a transformers module as function(x, weight, zero_centered); it ignores the last."""

    def function(x, weight, zero_centered):
        return torch.func.functional_call(module, {"weight": weight}, (x,))

    return function


@IMPLEMENTATIONS
@pytest.mark.parametrize("module, zero_centered", MODULES)
def test_modules_of_transformers(module, zero_centered, implementation, device):
    """Compare outputs and gradients."""
    inputs, module = drawn(3, 5, 48, zero_centered=zero_centered), module(48, eps=1e-5)
    expected = evaluate(of_module(module), inputs, ("x", "weight"))
    actual = run(implementation, on_device(inputs, device) | {"eps": 1e-5})
    assert_all_close(actual, expected, twice(TOLERANCES))


@IMPLEMENTATIONS
@pytest.mark.parametrize("module, zero_centered", MODULES)
def test_transformers_in_bfloat16(module, zero_centered, implementation, device):
    """Qwen3's norm rounds once more: ours may differ from it by 2 roundings, from fp64 by 1."""
    inputs = drawn(64, 128, dtype=torch.bfloat16, zero_centered=zero_centered)
    theirs = of_module(module(128))(**inputs)
    actual = run(implementation, on_device(inputs, device))["output 0"].cpu()
    one = ROUNDED_ONCE[torch.bfloat16]
    assert_close("output", actual, theirs, Tolerance(2 * one.ratio, 2 * one.max_abs))
    assert_close("output", actual, npu_ops.rms_norm(**floats(inputs, torch.float64)), one)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_it_is_torchs(zero_centered):
    inputs = drawn(5, 60, dtype=torch.float64, zero_centered=zero_centered)

    def theirs(x, weight, zero_centered):
        return torch.nn.functional.rms_norm(x, (60,), weight + zero_centered, eps=1e-6)

    expected = evaluate(theirs, inputs, ("x", "weight"))
    assert_all_close(evaluate(npu_ops.rms_norm, inputs, ("x", "weight")), expected, TOLERANCES)


@OF_SUMS
@pytest.mark.parametrize("dtype", DTYPES, ids=named)
@pytest.mark.parametrize("shape", [(7, 96), (2, 3, 40), (2, 20000)])
def test_a_sum_and_its_norm_are_the_bits_of_both_by_themselves(
    shape, dtype, implementation, device
):
    """A trainer that adds first and a server with the fused op get the same bits."""
    inputs = on_device(drawn(*shape, dtype=dtype), device)
    inputs["residual"] = torch.randn(shape).to(dtype).to(device)

    def apart(x, residual, **settings):
        return npu_ops.rms_norm(x + residual, **settings), x + residual

    with forced(implementation, "rms_norm", "rms_norm_backward"):
        expected = evaluate(apart, inputs, SUMMED)
    actual = run_add(implementation, inputs)
    for name in ("output 0", "output 1"):
        assert torch.equal(actual[name], expected[name])
    # Two separate calls round the gradient of the sum once more.
    assert_all_close(actual, expected, twice(TOLERANCES))


@OF_SUMS
def test_a_sum_that_nobody_uses_has_no_gradient(implementation, device):
    inputs = on_device(drawn(9, 32), device)
    inputs["residual"] = torch.randn(9, 32).to(device)

    def the_norm(**inputs):
        return npu_ops.add_rms_norm(**inputs)[0]

    def apart(x, residual, **settings):
        return npu_ops.rms_norm(x + residual, **settings)

    expected = evaluate(apart, inputs, SUMMED)
    with forced(implementation, "add_rms_norm", "add_rms_norm_backward"):
        actual = evaluate(the_norm, inputs, SUMMED)
    assert_all_close(actual, expected, TOLERANCES)


@IMPLEMENTATIONS
def test_an_eps_of_0(implementation, device):
    """A tile's padding rows have a root mean square of 0, and must not spoil any gradient."""
    inputs = on_device(drawn(5, 40), device) | {"eps": 0.0}
    expected = run("reference", floats(inputs, torch.float64))
    assert_all_close(run(implementation, inputs), expected, TOLERANCES)
