"""Tests of rms_norm_gated and of its reference, against each other, transformers and torch."""

import itertools

import pytest
import support
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

import npu_ops
from npu_ops.core import env
from npu_ops.core.compare import Tolerance, assert_close
from npu_ops.ops.rms_norm_gated import op
from npu_ops.ops.rms_norm_gated.cases import DIFFERENTIABLE, TOLERANCES

OPS = ("rms_norm_gated", "rms_norm_gated_backward")
IMPLEMENTATIONS = support.every_implementation(op.forward)
FORMULAS = pytest.mark.parametrize(
    "before, activation", list(itertools.product([True, False], ["silu", "sigmoid"]))
)
norm = npu_ops.rms_norm_gated


run = support.runner(norm, "rms_norm_gated", DIFFERENTIABLE)


def drawn(*shape, dtype=torch.float32, **settings):
    """Return inputs with x and z of this shape."""
    x, z, weight = torch.randn(shape), torch.randn(shape), 1 + torch.randn(shape[-1]) / 4
    return {"x": x.to(dtype), "weight": weight.to(dtype), "z": z.to(dtype)} | settings


# Results, compared with the reference


def of_transformers(module):
    """Return a transformers module as a function of (x, weight, z)."""

    def function(x, weight, z):
        return torch.func.functional_call(module, {"weight": weight}, (x, z))

    return function


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    "module, settings",
    [
        (Qwen3NextRMSNormGated(48, eps=1e-5), {"norm_before_gate": True}),
        (MambaRMSNormGated(48, 48, eps=1e-5), {"norm_before_gate": False}),
        (MambaRMSNormGated(48, 16, eps=1e-5), {"norm_before_gate": False, "group_size": 16}),
    ],
    ids=["qwen3-next", "mamba2", "mamba2-groups"],
)
def test_modules_of_transformers(module, settings, implementation, device):
    """Compare outputs and gradients, with the norm before and after the gate."""
    inputs = drawn(3, 5, 48)
    expected = support.evaluate(of_transformers(module), inputs, DIFFERENTIABLE)
    actual = run(implementation, support.on_device(inputs, device) | settings | {"eps": 1e-5})
    support.assert_all_close(actual, expected, support.twice(TOLERANCES))


@IMPLEMENTATIONS
def test_transformers_in_bfloat16(implementation, device):
    """transformers rounds three times: ours may differ from it by 3 roundings, from fp64 by 1."""
    inputs = drawn(64, 128, dtype=torch.bfloat16)
    theirs = of_transformers(Qwen3NextRMSNormGated(128))(**inputs)
    actual = run(implementation, support.on_device(inputs, device))["output 0"].cpu()
    one = TOLERANCES[torch.bfloat16]
    assert_close("output", actual, theirs, Tolerance(3 * one.ratio, 3 * one.max_abs))
    assert_close("output", actual, norm(**support.floats(inputs, torch.float64)), one)


@FORMULAS
def test_is_built_of_torchs_functions(before, activation):
    """Compare with torch.nn.functional's rms_norm, silu and sigmoid in fp64."""
    inputs = drawn(7, 33, dtype=torch.float64)
    act = torch.nn.functional.silu if activation == "silu" else torch.sigmoid

    def function(x, weight, z):
        if before:
            return torch.nn.functional.rms_norm(x, (33,), weight, 1e-6) * act(z)
        return torch.nn.functional.rms_norm(x * act(z), (33,), weight, 1e-6)

    expected = support.evaluate(function, inputs, DIFFERENTIABLE)
    settings = {"norm_before_gate": before, "activation": activation}
    actual = support.evaluate(norm, inputs | settings, DIFFERENTIABLE)
    support.assert_all_close(actual, expected, TOLERANCES)


@IMPLEMENTATIONS
@FORMULAS
@pytest.mark.parametrize("group_size", [1, 8, 24, 48])
def test_groups_are_rows_of_their_own(group_size, before, activation, implementation, device):
    inputs = drawn(5, 48, norm_before_gate=before, activation=activation, eps=0.1)
    grouped = run(implementation, support.on_device(inputs, device) | {"group_size": group_size})

    def by_hand(x, weight, z, **settings):
        parts = (t.split(group_size, dim=-1) for t in (x, weight, z))
        return torch.cat([norm(*part, **settings) for part in zip(*parts, strict=True)], -1)

    with support.forced("reference", *OPS):
        expected = support.evaluate(by_hand, support.floats(inputs, torch.float64), DIFFERENTIABLE)
    support.assert_all_close(grouped, expected, TOLERANCES)


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    "x, weight, z", [d for d in itertools.product(support.DTYPES, repeat=3) if len(set(d)) > 1]
)
def test_mixed_dtypes(x, weight, z, implementation, device):
    """No input is converted beforehand. The result has x's dtype, each gradient its input's."""
    inputs = drawn(6, 40)
    dtypes = dict(zip(DIFFERENTIABLE, (x, weight, z), strict=True))
    inputs = {name: inputs[name].to(dtype) for name, dtype in dtypes.items()}
    name = implementation if implementation != "cpu" or x == z else "reference"
    actual = run(name, support.on_device(inputs, device))
    assert actual["output 0"].dtype == x
    for name, dtype in dtypes.items():
        assert actual[f"gradient of {name}"].dtype == dtype
    support.assert_all_close(
        actual, run("reference", support.floats(inputs, torch.float64)), TOLERANCES
    )


@IMPLEMENTATIONS
@FORMULAS
def test_extreme_gates(before, activation, implementation, device):
    """Large gates give no inf or NaN if the exact result is finite."""
    ends = torch.tensor([0.0, 1e-4, 10.0, 88.0, 90.0, 1e3, 1e4])
    inputs = drawn(6, 14, norm_before_gate=before, activation=activation, eps=1e-3)
    inputs["z"] = torch.cat((ends, -ends)).expand(6, 14)
    expected = run("reference", support.floats(inputs, torch.float64))
    support.assert_all_close(
        run(implementation, support.on_device(inputs, device)), expected, TOLERANCES
    )


@IMPLEMENTATIONS
def test_special_values(implementation, device):
    """A NaN in x affects its own row, one in z its own element. A row of zeros stays zero."""
    inputs = drawn(4, 40)
    inputs["x"][0, 3], inputs["z"][2, 5], inputs["x"][3] = float("nan"), float("nan"), 0.0
    with support.forced(implementation, *OPS):
        out = norm(**support.on_device(inputs, device)).cpu()
    expected = of_transformers(Qwen3NextRMSNormGated(40))(**inputs)
    torch.testing.assert_close(out, expected, equal_nan=True)
    assert out[0].isnan().all() and out[2].isnan().sum() == 1 and not out[3].any()


# Properties of the function


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(1, 300), st.integers(-20, 20))
def test_does_not_depend_on_the_scale_of_x(tokens, dim, power):
    inputs = drawn(tokens, dim, eps=0.0)
    scaled = inputs | {"x": inputs["x"] * 2.0**power}
    assert torch.equal(norm(**scaled), norm(**inputs))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(1, 300), st.booleans())
def test_open_gates_leave_rows_of_rms_one(tokens, dim, before):
    inputs = drawn(tokens, dim, eps=0.0, activation="sigmoid", norm_before_gate=before)
    opened = {"z": torch.full((tokens, dim), 30.0), "weight": torch.ones(dim)}
    out = norm(**inputs | opened)
    torch.testing.assert_close(out.square().mean(-1), torch.ones(tokens))


# Layouts


STRIDED = {
    "dense": lambda: torch.randn(6, 4, 8),
    "slice of a fused projection": lambda: torch.randn(6, 64)[:, 8:40].unflatten(1, (4, 8)),
    "batch of slices": lambda: torch.randn(3, 6, 64)[..., 8:40].unflatten(2, (4, 8)),
    "batch, transposed": lambda: torch.randn(3, 4, 6, 8).transpose(1, 2),
    "last dimension not last": lambda: torch.randn(6, 8, 4).transpose(1, 2),
    "every second": lambda: torch.randn(6, 4, 16)[..., ::2],
    "expanded": lambda: torch.randn(4, 8).expand(6, 4, 8),
    "one row": lambda: torch.randn(8),
    "empty": lambda: torch.randn(0, 4, 8),
    "empty rows": lambda: torch.randn(4, 0),
}
LAYOUTS = pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED.keys())
GROUPS = pytest.mark.parametrize("groups", [1, 2])


def dense(x):
    return x.clone(memory_format=torch.contiguous_format)


def laid_out(make, groups):
    """Return the arguments, with x and a gradient from `make`, a dense z and a strided weight."""
    x = make()
    width = x.shape[-1]
    weight, settings = torch.randn(width, 2)[:, 0], {"group_size": (width // groups) or None}
    return {"x": x, "weight": weight, "z": torch.randn(x.shape)} | settings, make()


@LAYOUTS
@GROUPS
@IMPLEMENTATIONS
def test_any_layout(make, groups, implementation, device):
    inputs, grad = laid_out(make, groups)
    inputs, grad = support.on_device(inputs, device), grad.to(device)
    results = []
    for change in (lambda t: t, dense):
        leaves = {name: change(inputs[name]).detach().requires_grad_() for name in DIFFERENTIABLE}
        with support.forced(implementation, *OPS):
            out = norm(**inputs | leaves)
            results.append([out, *torch.autograd.grad(out, list(leaves.values()), change(grad))])
    for actual, expected in zip(*results, strict=True):
        assert actual.is_contiguous()
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@LAYOUTS
@GROUPS
def test_fake_is_like_real(make, groups):
    """Result and gradients have the shape, strides and dtype of real ones."""
    inputs, _ = laid_out(make, groups)
    group_size = inputs.pop("group_size")

    @support.with_gradients
    def function(*tensors):
        return norm(*tensors, group_size=group_size)

    support.assert_fake_is_like_real(
        function, inputs["x"].bfloat16(), inputs["weight"], inputs["z"]
    )


def test_a_slice_of_a_fused_projection_is_not_copied():
    z = torch.randn(64, 256)[:, 64:192].unflatten(1, (4, 32))
    x, weight = torch.randn(64, 4, 32), torch.ones(32)
    with env.override(strict=True), support.copies() as seen:
        norm(x, weight, z)
    assert seen.operators == []
    assert x.nbytes <= seen.allocated < x.nbytes + 1000


# The gradients


@IMPLEMENTATIONS
def test_gradient_of_weight_is_summed_in_fp32(implementation, device):
    """Over 3000 rows a bf16 sum would stop growing at 256."""
    x = torch.ones(3000, 8).bfloat16().to(device)
    weight = torch.ones(8, device=device, requires_grad=True)
    with support.forced(implementation, *OPS):
        out = norm(x, weight, torch.zeros_like(x), activation="sigmoid", eps=0.0)
        (grad,) = torch.autograd.grad(out, weight, torch.ones_like(out))
    expected = torch.full((8,), 1500.0)
    assert_close("gradient of weight", grad.cpu(), expected, TOLERANCES[torch.float32])


@FORMULAS
@pytest.mark.parametrize("group_size", [None, 3])
def test_gradcheck(before, activation, group_size):
    inputs = drawn(3, 2, 6, dtype=torch.float64)
    tensors = [inputs[name].requires_grad_() for name in DIFFERENTIABLE]

    def function(*tensors):
        return norm(*tensors, norm_before_gate=before, activation=activation, group_size=group_size)

    assert torch.autograd.gradcheck(function, tensors)


# Support for torch.compile, autograd and other features of torch


def test_mixed_halves_run_by_the_reference():
    inputs = drawn(3, 8)
    chosen = npu_ops.explain("rms_norm_gated", **inputs)
    assert [v.implementation for v in chosen if v.why_not is None] == ["cpu"]
    mixed = npu_ops.explain(norm, **inputs | {"z": inputs["z"].half()})
    assert [v.implementation for v in mixed if v.why_not is None] == ["reference"]
    why_not = {v.implementation: v.why_not for v in mixed}
    assert "float16" in why_not["cpu"]
