"""bias_dropout_add: every implementation against the reference, and the reference against torch."""

import itertools
from unittest import mock

import pytest
import support
import torch
from torch.utils.checkpoint import checkpoint

import npu_ops
from npu_ops.core import env, rng
from npu_ops.core.compare import assert_close
from npu_ops.ops.bias_dropout_add import op
from npu_ops.ops.bias_dropout_add.cases import SUM_TOLERANCES, TOLERANCES

OPS = ("bias_dropout_add", "bias_dropout_add_backward")
TENSORS = ("x", "bias", "residual")
IMPLEMENTATIONS = support.every_implementation(op.forward)


STATE = 3, 5


def seeded(**inputs):
    """Call the public function with a fixed (seed, offset): all devices draw the same mask."""

    def state(device, generator):
        return torch.tensor(STATE, device=device)

    with mock.patch.object(rng, "new_state", state):
        return npu_ops.bias_dropout_add(**inputs)


run = support.runner(seeded, "bias_dropout_add", TENSORS)


# Results, compared with the reference


@IMPLEMENTATIONS
@pytest.mark.parametrize("shape", [None, (40,), (17, 3, 40)], ids=["none", "row", "full"])
@pytest.mark.parametrize("x, residual, out, bias", support.mixed_dtypes())
def test_mixed_dtypes(x, residual, out, bias, shape, implementation, device):
    """No input is converted beforehand, and each gradient has its input's dtype."""
    inputs = {
        "x": torch.randn(17, 3, 40).to(x), "residual": torch.randn(17, 3, 40).to(residual),
        "bias": shape and torch.randn(shape).to(bias), "p": 0.25, "training": True,
    }  # fmt: skip
    actual = run(implementation, support.on_device(inputs, device) | {"dtype": out})
    expected = run("reference", support.floats(inputs, torch.float64))
    assert actual["output 0"].dtype == out
    for name in TENSORS:
        if inputs[name] is not None:
            assert actual[f"gradient of {name}"].dtype == inputs[name].dtype
    support.assert_all_close(actual, expected, SUM_TOLERANCES)


@pytest.mark.parametrize("position", range(3))
def test_one_fp64_input_makes_the_arithmetic_fp64(position):
    dtypes = [torch.float64 if i == position else torch.bfloat16 for i in range(3)]
    x, bias, residual = (
        torch.randn(n).to(d) for n, d in zip(((9, 5), 5, (9, 5)), dtypes, strict=True)
    )
    out = seeded(x=x, bias=bias, residual=residual, p=0.5, training=True, dtype=torch.float64)
    wide = [t.double() for t in (x, bias, residual)]
    assert torch.equal(out, seeded(x=wide[0], bias=wide[1], residual=wide[2], p=0.5, training=True))


def test_result_dtype_is_the_residuals_unless_named():
    x, residual = torch.randn(4, 8).bfloat16(), torch.randn(4, 8)
    assert npu_ops.bias_dropout_add(x, None, residual, 0.1, True).dtype == torch.float32
    assert npu_ops.bias_dropout_add(residual, None, x, 0.1, True).dtype == torch.bfloat16
    out = npu_ops.bias_dropout_add(x, None, residual, 0.1, True, dtype=torch.float16)
    assert out.dtype == torch.float16


@IMPLEMENTATIONS
@pytest.mark.parametrize("p, training", [(0.0, True), (0.0, False), (0.3, False), (0, True)])
@pytest.mark.parametrize("bias", [None, (24,), (6, 5, 24)], ids=["none", "row", "full"])
def test_without_dropping_it_is_torchs_expression_exactly(
    p, training, bias, implementation, device
):
    x, residual = torch.randn(6, 5, 24), torch.randn(6, 5, 24)
    bias = None if bias is None else torch.randn(bias)
    total = x if bias is None else x + bias
    expected = residual + torch.nn.functional.dropout(total, p, training)
    moved = [t if t is None else t.to(device) for t in (x, bias, residual)]
    state = torch.get_rng_state()
    with support.forced(implementation, *OPS):
        out = npu_ops.bias_dropout_add(*moved, p, training)
    assert torch.equal(out.cpu(), expected)
    assert torch.equal(torch.get_rng_state(), state), "nothing is drawn where nothing drops"


@IMPLEMENTATIONS
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_with_dropping_it_has_torchs_semantics(p, implementation, device):
    """As in F.dropout, kept elements and their gradients are divided by the keep probability."""
    x, bias, residual = torch.randn(64, 96), torch.randn(96), torch.randn(64, 96)
    inputs = {"x": x, "bias": bias, "residual": residual, "p": p, "training": True}
    moved = support.on_device(inputs, device)
    results = {name: value.cpu() for name, value in run(implementation, moved).items()}
    added = results["output 0"] - residual
    dropped = added == 0
    assert abs(dropped.double().mean() - p) < 0.02
    scaled = (x + bias) * rng.scale(p)
    torch.testing.assert_close(added, scaled.where(~dropped, 0), rtol=1e-5, atol=1e-5)
    grad = support.exact(x, 7)
    torch.testing.assert_close(results["gradient of x"], (grad * rng.scale(p)).where(~dropped, 0))
    assert torch.equal(results["gradient of residual"], grad)


@IMPLEMENTATIONS
@pytest.mark.parametrize("p", [1e-6, 0.9999, 0.99999])
def test_the_scale_is_of_what_is_drawn(p, implementation, device):
    """The scale uses p in steps of 2^-16; at 0.99999 the exact p would shift the mean by half."""
    x = torch.ones(512, 1024, device=device)
    with support.forced(implementation, *OPS):
        out = npu_ops.bias_dropout_add(x, None, torch.zeros_like(x), p, True)
    kept = out[out != 0]
    assert kept.numel()
    scale = 65536 / (65536 - min(max(round(p * 65536), 1), 65535))
    torch.testing.assert_close(kept, torch.full_like(kept, scale))


def test_mean_is_kept():
    """E[out] = x + residual, within 5 sigma."""
    x = torch.ones(1_000_000)
    out = npu_ops.bias_dropout_add(x, None, x, 0.1, True)
    assert abs(out.double().mean().item() - 2) < 5 * (0.1 / 0.9 / x.numel()) ** 0.5


@IMPLEMENTATIONS
def test_dropped_infinities_and_nans_do_not_leak(implementation, device):
    x = torch.tensor([float("inf"), float("-inf"), float("nan"), 1.0]).repeat(500).to(device)
    with support.forced(implementation, *OPS):
        out = seeded(x=x, bias=None, residual=torch.zeros_like(x), p=0.5, training=True)
    keep = rng.keep_mask(1, 2000, 0.5, torch.tensor(STATE, device=device))
    expected = torch.where(keep[0], x * 2, 0)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=support.named)
def test_conversions_are_torchs_for_every_value(dtype, implementation, device):
    """Read every 16-bit pattern, and round numbers close to each of them."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).to(device)
    wide = every.float()
    around = torch.cat([wide * (1 + step * 2.0**-12) for step in range(-9, 10)])
    with support.forced(implementation, *OPS):
        read = npu_ops.bias_dropout_add(every, None, torch.zeros_like(wide), 0, False)
        written = npu_ops.bias_dropout_add(
            around, None, torch.zeros_like(around), 0, False, dtype=dtype
        )
    torch.testing.assert_close(read, wide, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(written, around.to(dtype), rtol=0, atol=0, equal_nan=True)


@IMPLEMENTATIONS
@pytest.mark.parametrize("shape", [(48,), (7, 48), (2, 3, 4, 48), (1, 1, 48)])
def test_any_rank(shape, implementation, device):
    inputs = {"x": torch.randn(shape), "bias": torch.randn(48), "residual": torch.randn(shape)}
    settings = {"p": 0.4, "training": True}
    moved = {k: v.to(device) for k, v in inputs.items()} | settings
    expected = run("reference", support.floats(inputs | settings, torch.float64))
    support.assert_all_close(run(implementation, moved), expected, SUM_TOLERANCES)


def test_strided_inputs():
    x, bias, residual = torch.randn(30, 2, 16), torch.randn(32), torch.randn(16, 2, 30)
    strided = {"x": x[::3], "bias": bias[::2], "residual": residual.permute(2, 1, 0)[:10]}
    dense = {name: t.clone(memory_format=torch.contiguous_format) for name, t in strided.items()}
    settings = {"p": 0.4, "training": True}
    actual, expected = (run("cpu", inputs | settings) for inputs in (strided, dense))
    support.assert_same_bits(actual, expected)


def test_expanded_gradient():
    """The gradient that `out.sum()` sends back is one number with stride 0."""
    x = torch.randn(20, 30, requires_grad=True)
    with env.override(strict=True):
        seeded(x=x, bias=None, residual=torch.zeros(20, 30), p=0.5, training=True).sum().backward()
    assert set(x.grad.unique().tolist()) == {0.0, 2.0}


def test_empty():
    x, bias = torch.randn(0, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    out = npu_ops.bias_dropout_add(x, bias, torch.randn(0, 8), 0.1, True)
    out.sum().backward()
    assert out.shape == x.grad.shape == (0, 8)
    assert torch.equal(bias.grad, torch.zeros(8))


# Random numbers


def block(x, weight, bias, residual):
    return npu_ops.bias_dropout_add(x @ weight, bias, residual, 0.3, True).tanh()


def gradients(run_block, tensors):
    leaves = [t.clone().requires_grad_() for t in tensors]
    torch.manual_seed(17)
    hidden = run_block(run_block(*leaves), *leaves[1:])
    hidden.square().sum().backward()
    return [hidden.detach(), *(leaf.grad for leaf in leaves), torch.rand(4)]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_repeats_the_mask(use_reentrant):
    """Outputs, gradients and the generator afterwards are those without checkpointing."""
    tensors = torch.randn(64, 32), torch.randn(32, 32), torch.randn(32), torch.randn(64, 32)

    def checkpointed(*args):
        return checkpoint(block, *args, use_reentrant=use_reentrant)

    for actual, expected in zip(
        gradients(checkpointed, tensors), gradients(block, tensors), strict=True
    ):
        assert torch.equal(actual, expected)


def test_fork_rng_repeats_the_mask():
    x = torch.randn(32, 32)
    torch.manual_seed(1)
    with torch.random.fork_rng():
        first = npu_ops.bias_dropout_add(x, None, x, 0.5, True)
    assert torch.equal(npu_ops.bias_dropout_add(x, None, x, 0.5, True), first)


def test_the_gradient_of_a_wide_bias_is_not_rounded_to_the_dtype_of_the_result():
    x, grad = torch.randn(2, 50, 8).bfloat16()
    bias = torch.zeros(8, requires_grad=True)
    npu_ops.bias_dropout_add(x, bias, x, 0.0, True).backward(grad)
    torch.testing.assert_close(bias.grad, grad.float().sum(0), rtol=1e-6, atol=1e-6)


def test_generator_is_used_and_the_default_one_left():
    x = torch.randn(32, 32)
    draw, before = torch.Generator().manual_seed(9), torch.get_rng_state()
    first, second = (
        npu_ops.bias_dropout_add(x, None, x, 0.5, True, generator=draw) for _ in range(2)
    )
    draw.manual_seed(9)
    assert torch.equal(npu_ops.bias_dropout_add(x, None, x, 0.5, True, generator=draw), first)
    assert not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)


def test_default_generator_is_advanced():
    x = torch.randn(32, 32)
    torch.manual_seed(9)
    first, second = (npu_ops.bias_dropout_add(x, None, x, 0.5, True) for _ in range(2))
    torch.manual_seed(9)
    assert torch.equal(npu_ops.bias_dropout_add(x, None, x, 0.5, True), first)
    assert not torch.equal(first, second)


def test_backward_keeps_no_mask_and_no_input():
    x, bias, residual = (torch.randn(n, requires_grad=True) for n in ((64, 32), 32, (64, 32)))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.shape) or t, lambda t: t
    ):
        npu_ops.bias_dropout_add(x, bias, residual, 0.1, True)
        npu_ops.bias_dropout_add(x, bias, residual, 0.1, False)
    assert saved == [(2,)]


def test_memory_is_the_outputs_alone():
    """Neither forward nor backward allocates a mask or an fp32 copy."""
    inputs = [torch.randn(256, 512).bfloat16().requires_grad_() for _ in range(2)]
    size = inputs[0].numel() * 2
    with support.copies() as forward:
        out = npu_ops.bias_dropout_add(inputs[0], None, inputs[1], 0.1, True)
    grad = torch.randn_like(out)
    with support.copies() as backward:
        torch.autograd.grad(out, inputs, grad)
    assert size <= forward.allocated < size + 1000
    assert size <= backward.allocated < size + 1000


# The gradients


@pytest.mark.parametrize("implementation", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=support.named)
def test_bias_gradient_is_summed_in_fp32(implementation, dtype):
    """Over 50 000 rows, a bf16 sum would stop growing at 256."""
    inputs = {
        "x": torch.zeros(50_000, 8, dtype=dtype), "residual": torch.zeros(50_000, 8, dtype=dtype),
        "bias": torch.zeros(8, requires_grad=True), "p": 0.25, "training": True,
    }  # fmt: skip
    grad = (torch.rand(50_000, 8) + 0.5).to(dtype)
    with support.forced(implementation, *OPS):
        (actual,) = torch.autograd.grad(seeded(**inputs), inputs["bias"], grad)
    wide = support.floats(inputs, torch.float64)
    with support.forced("reference", *OPS):
        (expected,) = torch.autograd.grad(seeded(**wide), inputs["bias"], grad.double())
    assert expected.min() > 40_000
    assert_close("bias gradient", actual, expected, SUM_TOLERANCES[torch.float32])


@pytest.mark.parametrize("width", [1, 2, 7, 130, 1024])
@pytest.mark.parametrize("rows", [1, 2, 9, 37])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=support.named)
def test_gradients_of_halves_are_torchs_exactly(dtype, rows, width):
    """The CPU kernel reads bf16 in pairs, two rows at a time. A dropped NaN reaches nothing."""
    grad = torch.randn(rows, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    grad.view(-1)[::5] *= 1e-6
    state, p = torch.tensor([rows, width]), 0.4
    keep = rng.keep_mask(rows, width, p, state)
    for value in (0.0, torch.inf, -torch.inf, torch.nan):
        grad[~keep] = value
        expected = torch.where(keep, grad.float() * rng.scale(p), 0.0)
        grad_x, grad_bias = op.backward(grad, state, p, dtype, True)
        assert torch.equal(grad_x, expected.to(dtype))
        torch.testing.assert_close(grad_bias, expected.sum(0), rtol=1e-5, atol=1e-5)
    grad[0] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0]).repeat(width)[:width]
    expected = torch.where(keep, grad.float() * rng.scale(p), 0.0).to(dtype)
    grad_x, _ = op.backward(grad, state, p, dtype, False)
    torch.testing.assert_close(grad_x, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=support.named)
def test_the_bias_gradient_does_not_depend_on_threads(dtype):
    grad = torch.randn(150, 2048, generator=torch.Generator().manual_seed(3)).to(dtype)
    support.assert_threads_change_nothing(
        lambda: {"bias": op.backward(grad, torch.tensor([1, 2]), 0.1, dtype, True)[1]}
    )


@pytest.mark.parametrize("wanted", list(itertools.product([True, False], repeat=3)))
@pytest.mark.parametrize("bias_shape", [(8,), (12, 8)], ids=["row", "full"])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_only_wanted_gradients(wanted, bias_shape, p):
    tensors = dict(
        zip(TENSORS, (torch.randn(12, 8), torch.randn(bias_shape), torch.randn(12, 8)), strict=True)
    )
    settings = {"p": p, "training": True}
    names = tuple(itertools.compress(TENSORS, wanted))
    every = run("cpu", tensors | settings)
    if not names:
        assert not seeded(**tensors, **settings).requires_grad
        return
    some = support.evaluate(seeded, tensors | settings, names)
    assert some.keys() == {"output 0", *(f"gradient of {name}" for name in names)}
    support.assert_same_bits(some, every)


@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("bias_shape", [None, (4,), (3, 2, 4)], ids=["none", "row", "full"])
def test_gradcheck(bias_shape, p):
    tensors = [
        None if shape is None else torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((3, 2, 4), bias_shape, (3, 2, 4))
    ]

    def function(x, bias, residual):
        return seeded(x=x, bias=bias, residual=residual, p=p, training=True)

    assert torch.autograd.gradcheck(function, tensors)
    assert torch.autograd.gradgradcheck(function, tensors)


def test_double_backward_in_fp32():
    """In the native kernels, the gradient of the gradient uses the forward's mask again."""
    x = torch.randn(16, 8, requires_grad=True)
    out = seeded(x=x, bias=None, residual=torch.zeros(16, 8), p=0.5, training=True)
    grad_out = torch.randn(16, 8, requires_grad=True)
    (grad_x,) = torch.autograd.grad(out, x, grad_out, create_graph=True)
    (again,) = torch.autograd.grad(grad_x, grad_out, torch.ones(16, 8))
    assert torch.equal(again != 0, out != 0)


# In place


@IMPLEMENTATIONS
@pytest.mark.parametrize("p, training", [(0.1, False), (0.5, True)])
def test_inplace_writes_x(p, training, implementation, device):
    x, bias, residual = (torch.randn(n, device=device).bfloat16() for n in ((9, 24), 24, (9, 24)))
    others = bias.clone(), residual.clone()
    inputs = {"bias": bias, "residual": residual, "p": p, "training": training}
    with support.forced(implementation, *OPS):
        expected = seeded(x=x, **inputs)
        version = x._version
        out = seeded(x=x, **inputs, inplace=True)
    assert out is x and x._version > version
    assert torch.equal(x, expected)
    assert torch.equal(bias, others[0]) and torch.equal(residual, others[1])


def test_inplace_onto_its_own_residual():
    x = torch.randn(9, 24)
    expected = npu_ops.bias_dropout_add(x, None, x, 0.0, False)
    assert torch.equal(npu_ops.bias_dropout_add(x, None, x, 0.0, False, inplace=True), expected)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inplace_is_allowed_where_nothing_is_recorded(context):
    x = torch.randn(9, 24, requires_grad=True)
    expected = x.detach() + 1
    with context():
        npu_ops.bias_dropout_add(x, None, torch.ones(9, 24), 0.1, False, inplace=True)
    assert torch.equal(x.detach(), expected)


# Support for torch.compile, autograd and other features of torch


def operator_inputs(dtype=torch.float32, requires_grad=True):
    x, bias, residual = (torch.randn(n, dtype=dtype) for n in ((6, 16), 16, (6, 16)))
    for tensor in (x, bias, residual):
        tensor.requires_grad_(requires_grad)
    return x, bias, residual, torch.tensor([5, 6])


@support.parametrize_dtypes(torch.float64)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("drops", [True, False])
def test_opcheck(dtype, bias, drops):
    x, row, residual, state = operator_inputs(dtype)
    args = (x, row if bias else None, residual, state if drops else None, 0.25, torch.float32)
    torch.library.opcheck(torch.ops.npu_ops.bias_dropout_add.default, args)


@support.parametrize_dtypes(torch.float64)
def test_opcheck_in_place(dtype):
    x, bias, residual, state = operator_inputs(dtype, requires_grad=False)
    args = (x, bias, residual, state, 0.25)
    torch.library.opcheck(torch.ops.npu_ops.bias_dropout_add_.default, args)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("p, training", [(0.3, True), (0.3, False)])
def test_compile(backend, p, training):
    """Compiled to one graph, forward and backward use the mask that eager mode draws."""
    tensors = torch.randn(32, 16), torch.randn(16), torch.randn(32, 16)

    def function(x, bias, residual):
        return npu_ops.bias_dropout_add(x.sin(), bias, residual, p, training).cos()

    results = []
    with torch._inductor.config.patch(fallback_random=True):
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        for run_it in (function, compiled):
            leaves = [t.clone().requires_grad_() for t in tensors]
            torch.manual_seed(23)
            out = run_it(*leaves)
            out.sum().backward()
            results.append([out, *(leaf.grad for leaf in leaves)])
    torch._dynamo.reset()
    for actual, expected in zip(*results[::-1], strict=True):
        torch.testing.assert_close(actual, expected)


def test_compile_with_inductors_own_random_numbers():
    """The mask differs from eager's, but drops the right share and is the same in the backward."""
    x = torch.ones(256, 256, requires_grad=True)
    compiled = torch.compile(
        lambda x: npu_ops.bias_dropout_add(x * 2, None, torch.zeros_like(x), 0.25, True),
        fullgraph=True,
    )
    first, second = compiled(x), compiled(x)
    (grad,) = torch.autograd.grad(first.sum(), x)
    torch._dynamo.reset()
    assert torch.equal(grad != 0, first != 0)
    assert not torch.equal(first, second)
    assert abs((first == 0).double().mean() - 0.25) < 0.01


def test_compile_in_place():
    x, residual = torch.randn(32, 16), torch.randn(32, 16)
    expected = x + residual

    @torch.compile(fullgraph=True, backend="aot_eager")
    def function(x):
        npu_ops.bias_dropout_add(x, None, residual, 0.3, False, inplace=True)
        return x * 2

    out = function(x)
    torch._dynamo.reset()
    assert torch.equal(x, expected) and torch.equal(out, expected * 2)


@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.bfloat16], ids=support.named)
def test_autocast(residual_dtype):
    """The linear layer's bf16 output is not converted; the result has the residual's dtype."""
    linear, residual = torch.nn.Linear(32, 32), torch.randn(8, 32).to(residual_dtype)
    inputs = torch.randn(8, 32)
    with torch.autocast("cpu", torch.bfloat16):
        out = npu_ops.bias_dropout_add(linear(inputs), linear.bias, residual, 0.0, True)
        expected = residual.float() + (linear(inputs).float() + linear.bias)
    assert out.dtype == residual_dtype
    assert_close("output", out, expected, TOLERANCES[residual_dtype])
    out.float().square().sum().backward()
    assert linear.weight.grad.dtype == linear.bias.grad.dtype == torch.float32


STRIDED = {
    "dense": lambda: torch.randn(6, 4, 8),
    "transposed": lambda: torch.randn(4, 6, 8).transpose(0, 1),
    "last dimension not last": lambda: torch.randn(6, 8, 4).transpose(1, 2),
    "every second": lambda: torch.randn(6, 4, 16)[..., ::2],
    "expanded": lambda: torch.randn(4, 8).expand(6, 4, 8),
    "empty": lambda: torch.randn(0, 4, 8),
}


@pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=support.named)
def test_fake_is_like_real(make, dtype):
    """Result and gradients have the shape, strides and dtype of real ones."""

    @support.with_gradients
    def function(x, residual):
        return npu_ops.bias_dropout_add(x, None, residual, 0.1, True, dtype=dtype)

    support.assert_fake_is_like_real(function, make(), make().bfloat16())


def test_each_fp16_number():
    """The CPU kernels convert fp16 with CPU instructions. Results equal torch's; NaN stays NaN."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16).view(16, -1)
    wide = npu_ops.bias_dropout_add(halves, None, torch.zeros(16, 4096), 0.0, False)
    assert torch.equal(wide.nan_to_num(7), halves.float().nan_to_num(7))

    between = [halves.float(), wide.view(-1).nextafter(torch.tensor(torch.inf)).view(16, -1)]
    middles = (wide + wide.roll(-1, 1)) / 2  # ties, which round to even
    for x in (*between, middles, middles.nextafter(torch.tensor(0.0)), middles * 1e9):
        for columns in (4096, 4095):  # whole vectors only, and with a remainder
            given, zeros = x[:, :columns].contiguous(), torch.zeros(16, columns)
            found = npu_ops.bias_dropout_add(given, None, zeros, 0.0, False, dtype=torch.float16)
            assert torch.equal(found.nan_to_num(7), given.half().nan_to_num(7))
