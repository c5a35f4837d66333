"""l2norm: every implementation against the reference, the reference against transformers."""

import itertools

import pytest
import support
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_next.modeling_qwen3_next import l2norm as hugging_face

import npu_ops
from npu_ops.core import env
from npu_ops.core.compare import assert_close, error_ratio
from npu_ops.ops.l2norm import op, reference
from npu_ops.ops.l2norm.cases import TOLERANCES

OPS = ("l2norm", "l2norm_backward")
BOTH_ROUND = support.twice(TOLERANCES)
IMPLEMENTATIONS = support.every_implementation(op.forward)


run = support.runner(npu_ops.l2norm, "l2norm", ("x",))


# Results, compared with the reference


@IMPLEMENTATIONS
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("dim", [1, 2, 31, 32, 33, 64, 128, 256, 1000])
def test_hugging_face(dim, scale, implementation, device):
    """Compare with transformers' own function and arguments, gradients too."""
    inputs = {"x": torch.randn(2, 5, 3, dim) * scale, "dim": -1, "eps": 1e-6}
    wide = support.evaluate(hugging_face, support.floats(inputs, torch.float64), ("x",))
    actual = run(implementation, inputs | {"x": inputs["x"].to(device)})
    assert_close("output", actual["output 0"].cpu(), wide["output 0"], TOLERANCES[torch.float32])
    # The gradient is a difference of terms as large as y's gradient divided by the norm of x.
    expected = wide["gradient of x"].float()
    size = (inputs["x"].double().square().sum(-1, keepdim=True) + 1e-6).rsqrt() * 4
    error = (actual["gradient of x"].cpu() - expected).abs() / size
    assert error.max() < 2e-6


@IMPLEMENTATIONS
def test_eps_is_inside_the_root(implementation, device):
    """F.normalize does not add eps inside the root; an x with a small norm shows the difference."""
    x = torch.tensor([[3e-4, 4e-4]])
    out = run(implementation, {"x": x.to(device)})["output 0"].cpu()
    torch.testing.assert_close(out, x / (2.5e-7 + 1e-6) ** 0.5)
    assert out.norm() < 0.5
    assert torch.nn.functional.normalize(x, eps=1e-6).norm() > 0.999


@IMPLEMENTATIONS
@support.parametrize_dtypes()
def test_zero_rows(dtype, implementation, device):
    x = torch.zeros(3, 40, dtype=dtype, device=device)
    results = run(implementation, {"x": x, "eps": 1e-4})
    assert torch.equal(results["output 0"], x)
    expected = support.exact(x, 7) * 100
    assert_close("gradient of x", results["gradient of x"], expected, BOTH_ROUND[dtype])


@IMPLEMENTATIONS
@pytest.mark.parametrize("x_dtype, out_dtype", list(itertools.product(TOLERANCES, repeat=2)))
def test_output_dtype(x_dtype, out_dtype, implementation, device):
    """The result is rounded once to output_dtype, and the gradient to x's dtype."""
    inputs = {"x": torch.randn(7, 3, 40).to(x_dtype), "output_dtype": torch.float64}
    wide = support.floats(inputs, torch.float64)
    with support.forced("reference", *OPS):
        expected = support.evaluate(npu_ops.l2norm, wide, ("x",))
    doubles = torch.float64 in (x_dtype, out_dtype)
    moved = {"x": inputs["x"].to(device), "output_dtype": out_dtype}
    actual = run("reference" if doubles else implementation, moved)
    assert actual["output 0"].dtype == out_dtype and actual["gradient of x"].dtype == x_dtype
    loose = TOLERANCES | {torch.float64: TOLERANCES[torch.float32]}
    support.assert_all_close(actual, expected, loose)


def test_nearer_than_arithmetic_in_bfloat16():
    """transformers rounds x^2, the sum, the root and the product; npu-ops rounds
    only the product."""
    x = torch.randn(100, 128).bfloat16()
    expected = hugging_face(x.double())
    ours, theirs = (error_ratio(f(x), expected) for f in (npu_ops.l2norm, hugging_face))
    assert ours < 1.8e-3 < 2.2e-3 < theirs


def test_fp64_is_computed_in_fp64():
    x = torch.randn(5, 60, dtype=torch.float64)
    assert_close("x", npu_ops.l2norm(x), hugging_face(x), TOLERANCES[torch.float64])


# Properties of the function


rows = st.integers(1, 9)


@settings(max_examples=40, deadline=None)
@given(rows, st.integers(1, 300), st.floats(1e-2, 1e2), st.integers(0, 2**31))
def test_rows_have_length_one_and_their_gradients_are_across(tokens, dim, scale, seed):
    draw = torch.Generator().manual_seed(seed)
    x = (torch.randn(tokens, dim, generator=draw) * scale).requires_grad_()
    out = npu_ops.l2norm(x, 0.0)
    torch.testing.assert_close(out.norm(dim=-1), torch.ones(tokens))
    (grad,) = torch.autograd.grad(out, x, torch.randn(tokens, dim, generator=draw))
    along = (grad * out).sum(-1).abs() * x.norm(dim=-1)  # 0 up to rounding
    assert along.max() < 1e-5


@settings(max_examples=40, deadline=None)
@given(rows, st.integers(1, 300), st.integers(-20, 20))
def test_does_not_depend_on_the_scale(tokens, dim, power):
    x = torch.randn(tokens, dim)
    assert torch.equal(npu_ops.l2norm(x * 2.0**power, 0.0), npu_ops.l2norm(x, 0.0))


# Layouts


STRIDED = {
    "dense": lambda: torch.randn(6, 4, 8),
    "slice of a fused projection": lambda: torch.randn(6, 64)[:, 8:40].unflatten(1, (4, 8)),
    "batch of slices": lambda: torch.randn(3, 6, 64)[..., 8:40].unflatten(2, (4, 8)),
    "transposed": lambda: torch.randn(4, 6, 8).transpose(0, 1),
    "batch, transposed": lambda: torch.randn(3, 4, 6, 8).transpose(1, 2),
    "last dimension not last": lambda: torch.randn(6, 8, 4).transpose(1, 2),
    "every second": lambda: torch.randn(6, 4, 16)[..., ::2],
    "expanded": lambda: torch.randn(4, 8).expand(6, 4, 8),
    "one number": lambda: torch.randn(1, 1).expand(6, 8),
    "one element a row": lambda: torch.randn(6, 4, 8)[..., :1],
    "one row": lambda: torch.randn(8),
    "many dimensions": lambda: torch.randn(2, 1, 3, 1, 2, 8)[:, :, ::2],
    "empty": lambda: torch.randn(0, 4, 8),
    "empty rows": lambda: torch.randn(4, 0),
}
LAYOUTS = pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED.keys())


@LAYOUTS
@IMPLEMENTATIONS
def test_any_layout(make, implementation, device):
    """Results are the same for any strides of x and of the gradient; x stays unchanged."""
    x = make().to(device)
    dense = run(implementation, {"x": x.clone(memory_format=torch.contiguous_format)})
    before = x.clone()
    for name, value in run(implementation, {"x": x}).items():
        assert value.is_contiguous() and torch.equal(value, dense[name]), name
    assert torch.equal(x, before)
    grad = make().to(device)
    leaf = x.detach().requires_grad_()
    with support.forced(implementation, *OPS):
        out = npu_ops.l2norm(leaf)
        (strided,) = torch.autograd.grad(out, leaf, grad, retain_graph=True)
        (contiguous,) = torch.autograd.grad(
            out, leaf, grad.clone(memory_format=torch.contiguous_format)
        )
    assert torch.equal(strided, contiguous)


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=support.named)
def test_fake_is_like_real(make, dtype):
    """Result and gradient have the shape, strides and dtype of real ones."""

    @support.with_gradients
    def function(x):
        return npu_ops.l2norm(x, output_dtype=dtype)

    support.assert_fake_is_like_real(function, make())


def test_a_slice_of_a_fused_projection_is_not_copied():
    """A transposed batch of one is not copied either: only output and gradient are allocated."""
    fused = torch.randn(64, 3 * 4 * 32)
    for x in (fused[:, 128:256].unflatten(1, (4, 32)), torch.randn(1, 8, 64, 16).transpose(1, 2)):
        leaf = x.detach().requires_grad_()
        grad = torch.randn(x.shape)
        with env.override(strict=True), support.copies() as seen:
            out = npu_ops.l2norm(leaf)
            torch.autograd.grad(out, leaf, grad)
        assert seen.operators == []
        assert 2 * grad.nbytes <= seen.allocated < 2 * grad.nbytes + 1000


def test_backward_keeps_x_alone():
    fused = torch.randn(64, 96, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        npu_ops.l2norm(fused.detach().requires_grad_()[:, :32])
    assert [t.shape for t in saved] == [(64, 32)] and saved[0].stride() == (96, 1)


@IMPLEMENTATIONS
def test_wide_rows(implementation, device):
    """Every implementation takes rows longer than a tile."""
    x = torch.randn(2, 5000)
    expected = support.evaluate(npu_ops.l2norm, {"x": x.double()}, ("x",))
    with env.override(strict=True):
        support.assert_all_close(run(implementation, {"x": x.to(device)}), expected, TOLERANCES)


# The gradient


@pytest.mark.parametrize("shape", [(3, 2, 5), (4, 1), (7,)])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_gradcheck(shape, eps):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: npu_ops.l2norm(x, eps), x)


# Support for torch.compile, autograd and other features of torch


@IMPLEMENTATIONS
def test_special_values(implementation, device):
    """As in the formula: a NaN or an infinity affects its own row only."""
    x = torch.ones(4, 40)
    x[0, 3], x[2, 5] = float("nan"), float("inf")
    with support.forced(implementation, *OPS):
        out = npu_ops.l2norm(x.to(device)).cpu()
    torch.testing.assert_close(out, hugging_face(x), equal_nan=True, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("x, grad", [(torch.float32, torch.bfloat16), (torch.float64, None)])
def test_the_reference_computes_in_fp32_unless_an_input_is_wider(x, grad):
    tensor = torch.ones(2, 3, dtype=x)
    wide = torch.float64 if x == torch.float64 else torch.float32
    assert reference.l2norm(tensor, 1e-6).dtype == wide
    assert reference.l2norm_backward(tensor.to(grad or x), tensor, 1e-6).dtype == wide
