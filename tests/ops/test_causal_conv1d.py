"""causal_conv1d: every implementation against the reference, and the reference against torch."""

import itertools

import pytest
import support
import torch
import torch.nn.functional as F
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

import npu_ops
from npu_ops.core.compare import Tolerance
from npu_ops.ops.causal_conv1d import op, reference
from npu_ops.ops.causal_conv1d.cases import CASES, DIFFERENTIABLE, TOLERANCES

OPS = ("causal_conv1d", "causal_conv1d_backward")
IMPLEMENTATIONS = support.every_implementation(op.forward)
FP64 = {torch.float64: Tolerance(ratio=1e-13, max_abs=1e-12)}


run = support.runner(npu_ops.causal_conv1d, "causal_conv1d", DIFFERENTIABLE)


def torch_conv1d(
    x, weight, activation=None, bias=None, residual=None, initial_state=None,
    output_final_state=False, cu_seqlens=None,
):  # fmt: skip
    """Compute the op with torch.nn.functional.conv1d, one sequence after another."""
    spans = [(b, 0, x.shape[1]) for b in range(x.shape[0])]
    if cu_seqlens is not None:
        spans = [(0, *span) for span in itertools.pairwise(cu_seqlens.tolist())]
    channels, width = weight.shape
    outputs, states = [], []
    for n, (b, start, stop) in enumerate(spans):
        state = x.new_zeros(channels, width) if initial_state is None else initial_state[n]
        rows = torch.cat([state, x[b, start:stop].t()], dim=1)
        states.append(rows[:, -width:])
        if start < stop:
            y = F.conv1d(rows[None, :, 1:], weight[:, None], bias, groups=channels)[0].t()
            outputs.append(y if activation is None else F.silu(y))
    y = torch.cat(outputs).view(x.shape)
    return y if residual is None else y + residual, (
        torch.stack(states) if output_final_state else None
    )


def random_inputs(tokens=9, channels=6, width=4, lengths=None, batch=1, dtype=torch.float64):
    """Return every argument; the sequences are packed if there are lengths."""
    starts = lengths and torch.tensor([0, *itertools.accumulate(lengths)])
    tokens = sum(lengths) if lengths else tokens
    count = len(lengths) if lengths else batch
    shape = (batch, tokens, channels)
    tensors = {
        "x": torch.randn(shape), "weight": torch.randn(channels, width),
        "bias": torch.randn(channels), "residual": torch.randn(shape),
        "initial_state": torch.randn(count, channels, width),
    }  # fmt: skip
    settings = {"output_final_state": True, "activation": "silu", "cu_seqlens": starts}
    return {name: t.to(dtype) for name, t in tensors.items()} | settings


# Results, compared with the reference


@pytest.mark.parametrize("case", [c for c in CASES if c.channels < 200 and c.tokens], ids=str)
def test_reference_is_torchs_convolution(case):
    inputs = case.inputs(torch.float64)
    wrt = [name for name in DIFFERENTIABLE if name in inputs]
    support.assert_all_close(
        run("reference", inputs), support.evaluate(torch_conv1d, inputs, wrt), FP64
    )


@IMPLEMENTATIONS
def test_it_is_the_convolution_of_qwen3_next(implementation, device):
    """Compare with the layer's prefill and decode of one token: x [B, D, T], state W - 1 wide."""
    x, weight = torch.randn(2, 21, 24), torch.randn(24, 4)
    expected = qwen3_next.causal_conv1d_fn(x[:, :20].mT, weight, None, "silu").mT
    state = x[:, 17:20].mT.contiguous()
    last = qwen3_next.causal_conv1d_update(x[:, 20:].mT, state, weight, None, "silu").mT
    with support.forced(implementation, *OPS):
        y, _ = npu_ops.causal_conv1d(x.to(device), weight.to(device), activation="silu")
    torch.testing.assert_close(y.cpu(), torch.cat([expected, last], dim=1))


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=support.named)
@pytest.mark.parametrize("filter_dtype", [torch.float32, None], ids=["fp32-filter", "same"])
def test_dtypes(dtype, filter_dtype, implementation, device):
    """The filter may be fp32. Each gradient has its input's dtype."""
    inputs = random_inputs(lengths=[5, 9, 0, 1], channels=24, dtype=dtype)
    for name in ("weight", "bias"):
        inputs[name] = inputs[name].to(filter_dtype or dtype)
    expected = run("reference", support.floats(inputs, torch.float64))
    moved = support.on_device(inputs, device)
    actual = run(implementation, moved)
    assert actual["output 0"].dtype == actual["output 1"].dtype == dtype
    for name in DIFFERENTIABLE:
        assert actual[f"gradient of {name}"].dtype == inputs[name].dtype
    support.assert_all_close(actual, expected, TOLERANCES)


@IMPLEMENTATIONS
@pytest.mark.parametrize("activation", ["silu", None])
def test_large_and_special_values(activation, implementation, device):
    """Inputs reach +-1000. A NaN in the last token of a sequence stays out of the next sequence."""
    x = torch.linspace(-1000, 1000, 64).view(1, 16, 4)
    weight = torch.tensor([[0.0, 1.0]]).repeat(4, 1)
    x[0, 5, 1] = float("nan")
    starts = torch.tensor([0, 6, 16], device=device)
    with support.forced(implementation, *OPS):
        y, _ = npu_ops.causal_conv1d(
            x.to(device), weight.to(device), activation=activation, cu_seqlens=starts
        )
    expected = x if activation is None else F.silu(x)
    torch.testing.assert_close(y.cpu(), expected, equal_nan=True)


# Properties


@IMPLEMENTATIONS
@pytest.mark.parametrize("lengths", [[3, 7, 1, 40], [0, 5, 0, 0, 2], [1] * 9, [200, 1]], ids=str)
@pytest.mark.parametrize("width", [2, 3, 4])
def test_packed_equals_one_by_one(lengths, width, implementation, device):
    inputs = random_inputs(lengths=lengths, width=width, dtype=torch.float32)
    moved = support.on_device(inputs, device)
    with support.forced(implementation, *OPS):
        packed, last = npu_ops.causal_conv1d(**moved)
    parts = []
    for n, (start, stop) in enumerate(itertools.pairwise([0, *itertools.accumulate(lengths)])):
        one = {k: moved[k][:, start:stop] for k in ("x", "residual")}
        one |= {"initial_state": moved["initial_state"][n : n + 1], "cu_seqlens": None}
        with support.forced(implementation, *OPS):
            parts.append(npu_ops.causal_conv1d(**moved | one))
    alone = torch.cat([y for y, _ in parts], dim=1)
    # torch's silu of one value may differ by this much between positions in a tensor
    torch.testing.assert_close(packed, alone, rtol=1e-6, atol=1e-6)
    assert torch.equal(last, torch.cat([state for _, state in parts]))


@IMPLEMENTATIONS
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("cut", [0, 1, 2, 7, 39, 40])
def test_a_carried_state_continues_the_sequence(cut, width, implementation, device):
    inputs = random_inputs(tokens=40, width=width, batch=2, dtype=torch.bfloat16)
    inputs = support.on_device(inputs, device)
    with support.forced(implementation, *OPS):
        whole, last = npu_ops.causal_conv1d(**inputs)
        state, parts = inputs["initial_state"], []
        for span in (slice(cut), slice(cut, None)):
            one = {k: inputs[k][:, span] for k in ("x", "residual")}
            y, state = npu_ops.causal_conv1d(**inputs | one | {"initial_state": state})
            parts.append(y)
    assert torch.equal(torch.cat(parts, dim=1), whole) and torch.equal(state, last)


@IMPLEMENTATIONS
def test_the_gradient_through_a_carried_state_is_that_of_one_pass(implementation, device):
    inputs = random_inputs(tokens=30, channels=17, dtype=torch.float32)
    inputs = support.on_device(inputs, device)

    def in_two(x, residual, initial_state, **rest):
        state, parts = initial_state, []
        for span in (slice(0, 2), slice(2, 2), slice(2, 13), slice(13, None)):
            y, state = npu_ops.causal_conv1d(
                x[:, span], residual=residual[:, span], initial_state=state, **rest
            )
            parts.append(y)
        return torch.cat(parts, dim=1), state

    with support.forced(implementation, *OPS):
        actual = support.evaluate(in_two, inputs, DIFFERENTIABLE)
    support.assert_all_close(actual, run(implementation, inputs), TOLERANCES)


@IMPLEMENTATIONS
@pytest.mark.parametrize("lengths", [None, [3, 0, 2, 30]], ids=["batch", "packed"])
def test_strided_x_is_read_in_place(lengths, implementation, device):
    """x is a slice of a fused projection; states are every second slot of a pool, channels last.

    Outputs and gradients are those of a contiguous copy.
    """
    inputs = random_inputs(tokens=35, lengths=lengths, channels=16, dtype=torch.float32)
    fused = torch.randn(1, 35, 48, device=device)
    inputs = support.on_device(inputs, device)
    inputs["x"] = fused[..., 16:32]
    count = len(lengths) if lengths else 1
    states = torch.randn(2 * count, 4, 16, device=device)[::2].transpose(1, 2)
    weight = torch.ones(4, 16, device=device).t()
    with support.copies() as seen, support.forced(implementation, *OPS):
        npu_ops.causal_conv1d(**inputs | {"initial_state": states, "weight": weight})
    if implementation == "cpu":
        assert seen.operators == []
    actual = run(implementation, inputs)
    dense = run(implementation, inputs | {"x": inputs["x"].contiguous()})
    support.assert_same_bits(actual, dense)


@pytest.mark.parametrize("make", [
    lambda: torch.randn(7, 2, 8).transpose(0, 1), lambda: torch.randn(2, 8, 7).transpose(1, 2),
    lambda: torch.randn(2, 7, 16)[..., ::2], lambda: torch.randn(7, 8).expand(2, 7, 8),
], ids=["TBD", "BDT", "every second", "expanded"])  # fmt: skip
def test_any_strides(make):
    x, weight = make(), torch.randn(16, 4)[::2]
    actual = run("cpu", {"x": x, "weight": weight})
    expected = run("reference", {"x": x.double().contiguous(), "weight": weight.double()})
    support.assert_all_close(actual, expected, TOLERANCES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_channels_have_no_gradient(dtype):
    x, weight = torch.ones(2, 3, 0, dtype=dtype), torch.ones(0, 4, dtype=dtype)
    y, _ = npu_ops.causal_conv1d(x.requires_grad_(), weight)
    assert torch.autograd.grad(y.sum(), x)[0].shape == (2, 3, 0)


def test_empty():
    x = torch.randn(1, 0, 8, requires_grad=True)
    state = torch.randn(2, 8, 4, requires_grad=True)
    y, last = npu_ops.causal_conv1d(
        x, torch.randn(8, 4), initial_state=state, output_final_state=True,
        cu_seqlens=torch.tensor([0, 0, 0]),
    )  # fmt: skip
    assert y.shape == x.shape and torch.equal(last, state)
    (last * 3).sum().backward()
    assert torch.equal(state.grad, torch.full_like(state, 3)) and x.grad.shape == x.shape
    none, _ = npu_ops.causal_conv1d(x, torch.randn(8, 4), cu_seqlens=torch.tensor([0]))
    assert none.shape == x.shape


# The gradients


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("lengths", [None, [1, 0, 4]], ids=["batch", "packed"])
@pytest.mark.parametrize("activation", ["swish", None])
def test_gradcheck(width, lengths, activation):
    inputs = random_inputs(5, 2, width, lengths) | {"activation": activation}
    assert torch.autograd.gradcheck(
        *support.function_of_leaves(npu_ops.causal_conv1d, inputs, DIFFERENTIABLE)
    )


@IMPLEMENTATIONS
def test_gradients_are_the_same_each_time(implementation, device):
    inputs = random_inputs(tokens=3000, channels=40, dtype=torch.bfloat16)
    inputs = support.on_device(inputs, device)
    support.assert_threads_change_nothing(lambda: run(implementation, inputs))


@pytest.mark.parametrize("used", [(True, False), (False, True)], ids=["y", "state"])
def test_an_output_that_nobody_uses_has_no_gradient(used):
    inputs = random_inputs(tokens=6, dtype=torch.float32)
    leaves = {name: inputs[name].requires_grad_() for name in DIFFERENTIABLE}

    def loss(function):
        chosen = itertools.compress(function(**inputs), used)
        return torch.autograd.grad(
            sum(out.square().sum() for out in chosen), list(leaves.values()), allow_unused=True
        )

    for actual, expected in zip(loss(npu_ops.causal_conv1d), loss(torch_conv1d), strict=True):
        if expected is not None:
            torch.testing.assert_close(actual, expected)
        else:
            assert actual is None or not actual.any()


@pytest.mark.parametrize("starts", [[0, 4, 99], [0, -50, 9], [5, 2, 9], [99, 99, 99]], ids=str)
def test_the_reference_reads_nothing_outside_for_wrong_starts(starts):
    """On a device, cu_seqlens are not checked before the kernel; wrong ones are reported later."""
    inputs = random_inputs(lengths=[4, 5])
    x, weight, bias, residual, state = (inputs[name] for name in DIFFERENTIABLE)
    inputs = x, weight, bias, state, torch.tensor(starts), True
    y, final = reference.with_final_state(x, weight, bias, residual, *inputs[3:])
    assert y.shape == x.shape and final.shape == state.shape
    grads = reference.causal_conv1d_backward(y, final, *inputs)
    assert [grad.shape for grad in grads] == [t.shape for t in inputs[:4]]


def test_memory_is_the_outputs_alone():
    """Neither forward nor backward allocates a transposed or padded copy."""
    x, weight = torch.randn(1, 512, 256).bfloat16().requires_grad_(), torch.randn(256, 4)
    size = x.numel() * 2
    with support.copies() as forward:
        y, _ = npu_ops.causal_conv1d(x, weight.bfloat16(), activation="silu")
    grad = torch.randn_like(y)
    with support.copies() as backward:
        torch.autograd.grad(y, x, grad)
    assert size <= forward.allocated < size + 5000
    assert size <= backward.allocated < size + 10_000


# Support for torch.compile, autograd and other features of torch


@support.parametrize_dtypes(torch.float64)
@pytest.mark.parametrize("lengths", [None, [3, 0, 4]], ids=["batch", "packed"])
@pytest.mark.parametrize("everything", [True, False])
def test_opcheck(dtype, lengths, everything):
    inputs = random_inputs(7, lengths=lengths, dtype=dtype)
    tensors = [inputs[name] for name in DIFFERENTIABLE]
    if not everything:
        tensors[2:] = None, None, None
    for tensor in tensors:
        if tensor is not None:
            tensor.requires_grad_()
    args = (*tensors, inputs["cu_seqlens"], True, everything)
    torch.library.opcheck(torch.ops.npu_ops.causal_conv1d.default, args)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("lengths", [None, [3, 0, 4]], ids=["batch", "packed"])
def test_compile(backend, lengths):
    inputs = random_inputs(7, lengths=lengths, dtype=torch.float32)

    def function(x, **rest):
        y, state = npu_ops.causal_conv1d(x.sin(), **rest)
        return y.cos(), state

    support.assert_compiled_is_eager(
        *support.function_of_leaves(function, inputs, DIFFERENTIABLE), backend
    )


@pytest.mark.parametrize("make", [
    lambda: torch.randn(2, 6, 8), lambda: torch.randn(6, 2, 8).transpose(0, 1),
    lambda: torch.randn(2, 8, 6).transpose(1, 2), lambda: torch.randn(2, 6, 24)[..., 8:16],
    lambda: torch.randn(2, 0, 8),
], ids=["dense", "TBD", "BDT", "slice", "empty"])  # fmt: skip
def test_fake_is_like_real(make):
    """Results and gradients have the shape, strides and dtype of real ones."""

    @support.with_gradients
    def function(x, weight, state):
        return npu_ops.causal_conv1d(x, weight, initial_state=state, output_final_state=True)

    support.assert_fake_is_like_real(function, make(), torch.randn(8, 3), torch.randn(2, 8, 3))


# Checks of the operator


X, WEIGHT = torch.randn(1, 6, 8), torch.randn(8, 4)


def test_the_kernel_checks_cu_seqlens_again():
    """A compiled call skips the public function's checks."""
    args = (X, WEIGHT, None, None, None, torch.tensor([0, 9]), False, False)
    with pytest.raises(ValueError, match="cu_seqlens: got 0 first and 9 last, needs 0 and up to 6"):
        torch.ops.npu_ops.causal_conv1d(*args)


def test_explain():
    verdicts = npu_ops.explain("causal_conv1d", X, WEIGHT)
    assert [v.implementation for v in verdicts if v.why_not is None] == ["cpu"]
    (native,) = (v for v in npu_ops.explain("causal_conv1d", X.double(), WEIGHT)
                 if v.implementation == "cpu")  # fmt: skip
    assert native.why_not == "it has no float64 kernel"
