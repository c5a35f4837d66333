"""gdn_gate: every implementation against the reference, the reference against transformers."""

import itertools
import math

import pytest
import support
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

import npu_ops
from npu_ops.core import env
from npu_ops.core.compare import assert_close
from npu_ops.ops.gdn_gate import op, reference
from npu_ops.ops.gdn_gate.cases import CASES, DIFFERENTIABLE, TOLERANCES

OPS = ("gdn_gate", "gdn_gate_backward")
IMPLEMENTATIONS = support.every_implementation(op.forward)


run = support.runner(npu_ops.gdn_gate, "gdn_gate", DIFFERENTIABLE)


def formula(a, A_log, dt_bias, b):
    """Compute g and beta as in Qwen3NextGatedDeltaNet.forward."""
    beta = b.sigmoid()
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias)
    return g, beta


# Results, compared with the reference


@IMPLEMENTATIONS
@support.parametrize_dtypes()
def test_formula_of_transformers(dtype, implementation, device):
    """Expected gradients come from autograd in fp32: in bf16 it rounds within b's sigmoid."""
    inputs = CASES[1].inputs(dtype)
    del inputs["allow_neg_eigval"]
    expected = support.evaluate(formula, support.floats(inputs, torch.float32), DIFFERENTIABLE)
    support.assert_all_close(
        run(implementation, support.on_device(inputs, device)), expected, support.twice(TOLERANCES)
    )


def test_inside_a_layer_of_transformers(monkeypatch):
    """Our g and beta equal those that Qwen3-Next's layer passes to its delta rule."""
    seen = {}
    config = Qwen3NextConfig(
        hidden_size=32, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=8, linear_value_head_dim=8,
    )  # fmt: skip
    layer = qwen3_next.Qwen3NextGatedDeltaNet(config, 0)

    def rule(query, key, value, g, beta, **settings):
        seen.update(g=g, beta=beta)
        return value, None

    monkeypatch.setattr(qwen3_next, "torch_chunk_gated_delta_rule", rule)
    split = layer.fix_query_key_value_ordering

    def ordering(*args):
        *rest, seen["b"], seen["a"] = split(*args)
        return *rest, seen["b"], seen["a"]

    monkeypatch.setattr(layer, "fix_query_key_value_ordering", ordering)
    layer(torch.randn(2, 5, 32))
    g, beta = npu_ops.gdn_gate(seen["a"], layer.A_log, layer.dt_bias, seen["b"])
    assert g.shape == (2, 5, 4)
    assert_close("g", g, seen["g"], TOLERANCES[torch.float32])
    assert_close("beta", beta, seen["beta"], TOLERANCES[torch.float32])


@IMPLEMENTATIONS
@pytest.mark.parametrize("A_log", [-20.0, 0.0, 10.0])
def test_no_overflow(A_log, implementation, device):
    """Outputs and gradients are finite and follow torch's softplus for any argument."""
    ends = torch.tensor([0.0, 1e-4, 1.0, 10.0, 16.9, 17.1, 19.9, 20.1, 88.0, 90.0, 1e3, 1e4])
    a = torch.cat((ends, -ends))[:, None]
    inputs = {"a": a, "A_log": torch.tensor([A_log]), "b": a}
    expected = run("reference", support.floats(inputs, torch.float64))
    actual = run(implementation, support.on_device(inputs, device))
    for name, value in actual.items():
        assert value.isfinite().all(), name
        error = (value.cpu().double() - expected[name]).abs()
        largest = error / expected[name].abs().clamp(min=1e-25)
        assert largest.max() < 2e-6, name


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    "A_log, a",
    [(89, -120), (88.7, -120), (88.8, -95), (120, -150), (95, -17.1), (90, -16.9), (170, -180),
     (-90, 3e38), (300, -290)],
)  # fmt: skip
def test_finite_wherever_the_result_is(A_log, a, implementation, device):
    """g and its gradients stay finite, though exp(A_log) overflows or softplus(a) vanishes."""
    inputs = {"a": torch.tensor([[a]]).float(), "A_log": torch.tensor([A_log]).float()}

    def scaled(a, A_log):
        return npu_ops.gdn_gate(a, A_log) * 2.0**-60

    with support.forced(implementation, *OPS):
        actual = support.evaluate(scaled, support.on_device(inputs, device), ("a", "A_log"))
    wide = support.floats(inputs, torch.float64)

    def right(a, A_log):
        return -A_log.exp() * F.softplus(a) * 2.0**-60

    for name, expected in support.evaluate(right, wide, ("a", "A_log")).items():
        value = actual[name].cpu().double()
        torch.testing.assert_close(value, expected, rtol=2e-5, atol=1e-37, msg=f"{name}: {value}")


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    "beta, threshold", [(0.5, 20.0), (2.0, 20.0), (1.0, 2.0), (3.0, 0.0), (0.25, math.inf)]
)
def test_another_softplus(beta, threshold, implementation, device):
    """Compare with torch's softplus and autograd in fp64, on both sides of the threshold."""
    inputs = CASES[1].inputs(torch.float32)
    del inputs["allow_neg_eigval"]

    def right(a, A_log, dt_bias, b):
        return -A_log.exp() * F.softplus(a + dt_bias, beta, threshold), b.sigmoid()

    expected = support.evaluate(right, support.floats(inputs, torch.float64), DIFFERENTIABLE)
    given = support.on_device(
        inputs | {"softplus_beta": beta, "softplus_threshold": threshold}, device
    )
    if implementation == "ascendc":
        with pytest.raises(RuntimeError, match=f"softplus has beta {beta}, threshold {threshold}"):
            run(implementation, given)
    else:
        support.assert_all_close(run(implementation, given), expected, TOLERANCES)


@IMPLEMENTATIONS
def test_special_values(implementation, device):
    """A NaN or an infinity affects only its own element."""
    a = torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0])[:, None].repeat(1, 3)
    with support.forced(implementation, *OPS):
        g, beta = npu_ops.gdn_gate(*(t.to(device) for t in (a, torch.zeros(3))), b=a.to(device))
    torch.testing.assert_close(g.cpu(), -F.softplus(a), equal_nan=True)
    torch.testing.assert_close(beta.cpu(), a.sigmoid(), equal_nan=True)


@IMPLEMENTATIONS
@pytest.mark.parametrize("a, A_log, dt_bias, b", support.mixed_dtypes())
def test_mixed_dtypes(a, A_log, dt_bias, b, implementation, device):
    """No input is converted beforehand, and each gradient has its input's dtype."""
    inputs = CASES[1].inputs(torch.float32) | {"allow_neg_eigval": True}
    dtypes = dict(zip(DIFFERENTIABLE, (a, A_log, dt_bias, b), strict=True))
    inputs |= {name: inputs[name].to(dtype) for name, dtype in dtypes.items()}
    actual = run(implementation, support.on_device(inputs, device))
    assert actual["output 0"].dtype == torch.float32 and actual["output 1"].dtype == b
    for name, dtype in dtypes.items():
        assert actual[f"gradient of {name}"].dtype == dtype
    support.assert_all_close(
        actual, run("reference", support.floats(inputs, torch.float64)), TOLERANCES
    )


@pytest.mark.parametrize("position", range(3))
def test_one_fp64_input_makes_g_fp64(position):
    tensors = [torch.randn(n).bfloat16() for n in ((5, 4), 4, 4)]
    tensors[position] = tensors[position].double()
    g, beta = npu_ops.gdn_gate(*tensors, tensors[0].bfloat16())
    assert g.dtype == torch.float64 and beta.dtype == torch.bfloat16
    assert torch.equal(g, npu_ops.gdn_gate(*(t.double() for t in tensors)))


# Properties of the function


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.floats(-10, 10), st.integers(0, 2**31))
def test_gates_are_gates(tokens, heads, A_log, seed):
    """g is never positive, so no state grows; beta is at most 1, or 2 with allow_neg_eigval."""
    draw = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, tokens, heads, generator=draw) * 20
    rate = torch.full((heads,), A_log)
    g, beta = npu_ops.gdn_gate(a, rate, None, b)
    assert (g <= 0).all() and (beta >= 0).all() and (beta <= 1).all()
    wide, twice = npu_ops.gdn_gate(a, rate, None, b, allow_neg_eigval=True)
    assert torch.equal(wide, g) and torch.equal(twice, 2 * beta)
    shifted = npu_ops.gdn_gate(a + 1, rate, torch.full((heads,), -1.0))
    torch.testing.assert_close(shifted, g, rtol=1e-4, atol=1e-6 * math.exp(A_log))


@IMPLEMENTATIONS
def test_b_changes_nothing_of_g(implementation, device):
    inputs = support.on_device(CASES[1].inputs(torch.bfloat16), device)
    both = run(implementation, inputs)
    alone = run(implementation, inputs | {"b": None})
    assert alone.keys() == both.keys() - {"output 1", "gradient of b"}
    support.assert_same_bits(alone, both)


# Layouts


STRIDED = {
    "dense": lambda: torch.randn(6, 4, 8),
    "slice of a projection": lambda: torch.randn(6, 4, 20)[..., 8:16],
    "slice of few heads": lambda: torch.randn(101, 13)[..., 3:8],
    "transposed": lambda: torch.randn(4, 6, 8).transpose(0, 1),
    "last dimension not last": lambda: torch.randn(6, 8, 4).transpose(1, 2),
    "every second": lambda: torch.randn(6, 4, 16)[..., ::2],
    "expanded": lambda: torch.randn(4, 8).expand(6, 4, 8),
    "one token": lambda: torch.randn(8),
    "one head": lambda: torch.randn(6, 4, 8)[..., :1],
    "many dimensions": lambda: torch.randn(2, 1, 3, 1, 2, 8),
    "empty": lambda: torch.randn(0, 4, 8),
    "no heads": lambda: torch.randn(4, 0),
}
LAYOUTS = pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED.keys())


def dense(x):
    return x.clone(memory_format=torch.contiguous_format)


@LAYOUTS
@IMPLEMENTATIONS
def test_any_layout(make, implementation, device):
    a, b = make().to(device), make().to(device)
    heads = torch.randn(2, a.shape[-1], 2, device=device)[..., 0]
    inputs = {"a": a, "b": b, "A_log": heads[0], "dt_bias": heads[1]}
    expected = run(implementation, {name: dense(value) for name, value in inputs.items()})
    for name, value in run(implementation, inputs).items():
        assert value.is_contiguous()
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6)
    leaf, grads = a.detach().requires_grad_(), (make().to(device), make().to(device))
    with support.forced(implementation, *OPS):
        out = npu_ops.gdn_gate(leaf, heads[0], None, b)
        strided, contiguous = (
            torch.autograd.grad(out, leaf, each, retain_graph=True)[0]
            for each in (grads, [dense(grad) for grad in grads])
        )
    torch.testing.assert_close(strided, contiguous, rtol=1e-6, atol=1e-6)


@LAYOUTS
@pytest.mark.parametrize("beta", [True, False])
def test_fake_is_like_real(make, beta):
    """Results and gradients have the shape, strides and dtype of real ones."""

    @support.with_gradients
    def function(a, A_log, *b):
        return npu_ops.gdn_gate(a, A_log, None, *b)

    real = make(), torch.randn(make().shape[-1]), make().bfloat16()
    support.assert_fake_is_like_real(function, *(real if beta else real[:2]))


def test_slices_of_a_projection_are_not_copied():
    b, a = torch.randn(2, 64, 48).chunk(2, dim=-1)
    with env.override(strict=True), support.copies() as seen:
        npu_ops.gdn_gate(a, torch.zeros(24), torch.zeros(24), b)
    assert seen.operators == []
    assert 2 * a.nbytes <= seen.allocated < 2 * a.nbytes + 1000


# The gradients


@IMPLEMENTATIONS
def test_sums_are_in_fp32(implementation, device):
    """Over 3000 tokens a bf16 sum for A_log's gradient would stop growing at 256."""
    a = torch.zeros(3000, 3).bfloat16()
    inputs = {"a": a.to(device), "A_log": torch.zeros(3, device=device)}
    leaves = [inputs["A_log"].requires_grad_()]
    with support.forced(implementation, *OPS):
        (grad,) = torch.autograd.grad(npu_ops.gdn_gate(**inputs).sum(), leaves)
    expected = torch.full((3,), -3000 * 0.6931471805599453, dtype=torch.float64)
    assert_close("gradient of A_log", grad.cpu(), expected, TOLERANCES[torch.float32])


@pytest.mark.parametrize("names", [
    set(names) for n in range(1, 5) for names in itertools.combinations(DIFFERENTIABLE, n)
], ids=lambda names: "-".join(sorted(names)))  # fmt: skip
def test_only_wanted_gradients(names):
    inputs = CASES[1].inputs(torch.float32)
    every = run("cpu", inputs)
    wanted = [name for name in DIFFERENTIABLE if name in names]
    leaves = {name: inputs[name].detach().requires_grad_() for name in wanted}
    g, beta = npu_ops.gdn_gate(**inputs | leaves)
    grads = torch.autograd.grad(g.sum() + beta.sum(), list(leaves.values()), allow_unused=True)
    ones = {n: t.detach().requires_grad_() for n, t in inputs.items() if n in DIFFERENTIABLE}
    g, beta = npu_ops.gdn_gate(**ones)
    whole = torch.autograd.grad(g.sum() + beta.sum(), list(ones.values()))
    whole = dict(zip(ones, whole, strict=True))
    for name, grad in zip(wanted, grads, strict=True):
        assert torch.equal(grad, whole[name]) and f"gradient of {name}" in every


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("beta", [True, False])
def test_gradcheck(bias, beta):
    tensors = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True) if wanted else None
        for shape, wanted in (((3, 2, 4), True), (4, True), (4, bias), ((3, 2, 4), beta))
    ]
    assert torch.autograd.gradcheck(
        lambda *args: npu_ops.gdn_gate(*args, allow_neg_eigval=beta), tensors
    )


# Support for torch.compile, autograd and other features of torch


def test_autocast_keeps_g_in_fp32():
    linear, x = torch.nn.Linear(32, 8), torch.randn(5, 32)
    A_log = torch.zeros(8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        g, beta = npu_ops.gdn_gate(linear(x), A_log, None, linear(x))
    assert g.dtype == torch.float32 and beta.dtype == torch.bfloat16
    (g.sum() + beta.float().sum()).backward()
    assert linear.weight.grad.dtype == A_log.grad.dtype == torch.float32


def test_no_heads():
    """Tokens with 0 heads give empty results."""
    a, none = torch.ones(2, 3, 0), torch.ones(0)
    assert npu_ops.gdn_gate(a, none).shape == (2, 3, 0)
    assert npu_ops.explain("gdn_gate", a, none)


@pytest.mark.parametrize("beta, threshold", [(1.0, 20.0), (2.0, 20.0), (1.0, 16.9)])
@pytest.mark.parametrize("heads", [8192, 8193])
def test_what_ascendc_kernels_decline(heads, beta, threshold):
    arguments = op.forward.Arguments(*[None] * len(op.forward.Arguments._fields))
    arguments = arguments._replace(
        a=torch.ones(1, heads), softplus_beta=beta, softplus_threshold=threshold
    )
    says = op._against_ascendc(arguments)
    if heads > 8192:
        assert says == "rows of 8193 elements are longer than 8192"
    elif beta != 1 or threshold < 17:
        assert says.startswith(f"softplus has beta {beta}, threshold {threshold}, the kernel")
    else:
        assert says is None


def test_the_reference_rounds_beta_and_its_gradient_once():
    a, heads = torch.randn(3, 4), torch.randn(4)
    b = torch.randn(3, 4).bfloat16()
    settings = heads, heads, b, 1.0, 1.0, 20.0
    assert reference.gdn_gate(a, *settings)[1].dtype == torch.bfloat16
    *_, grad_b = reference.gdn_gate_backward(a, b, a, *settings)
    assert grad_b.dtype == torch.bfloat16


def test_the_reference_rounds_the_gradient_of_a_with_and_without_b():
    a, heads = torch.randn(3, 4).bfloat16(), torch.randn(4)
    for b in (a, None):
        grad_a, *_ = reference.gdn_gate_backward(a.float(), b, a, heads, heads, b, 1.0, 1.0, 20.0)
        assert grad_a.dtype == torch.bfloat16


def test_the_reference_computes_bf16_in_fp32():
    a, A_log = torch.randn(5, 4).bfloat16(), torch.randn(4)
    settings = A_log, None, None, 1.0, 1.0, 20.0
    assert torch.equal(
        reference.gdn_gate(a, *settings)[0], reference.gdn_gate(a.float(), *settings)[0]
    )
