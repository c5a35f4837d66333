"""causal_conv1d_qkv: all implementations against the reference, its three parts and Qwen3-Next."""

import itertools

import pytest
import support
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

import npu_ops
from npu_ops.core.compare import Tolerance
from npu_ops.ops.causal_conv1d_qkv import op, reference
from npu_ops.ops.causal_conv1d_qkv.cases import CASES, DIFFERENTIABLE, TOLERANCES

OPS = ("causal_conv1d_qkv", "causal_conv1d_qkv_backward")
IMPLEMENTATIONS = support.every_implementation(op.forward)
FP64 = {torch.float64: Tolerance(ratio=1e-13, max_abs=1e-12)}
# HK, HV, K, V
HEADS = (2, 3, 24, 16)


run = support.runner(npu_ops.causal_conv1d_qkv, "causal_conv1d_qkv", DIFFERENTIABLE)


def settings(heads, **rest):
    names = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
    return dict(zip(names, heads, strict=True)) | rest


def channels(heads):
    return 2 * heads[0] * heads[2] + heads[1] * heads[3]


def random_inputs(
    tokens=9, heads=HEADS, width=4, lengths=None, batch=1, dtype=torch.float64, device="cpu"
):  # fmt: skip
    """Return every argument; the sequences are packed if there are lengths."""
    starts = lengths and torch.tensor([0, *itertools.accumulate(lengths)], device=device)
    tokens = sum(lengths) if lengths else tokens
    count, width_of_x = len(lengths) if lengths else batch, channels(heads)
    tensors = {
        "x": torch.randn(batch, tokens, width_of_x), "weight": torch.randn(width_of_x, width),
        "bias": torch.randn(width_of_x), "initial_state": torch.randn(count, width_of_x, width),
    }  # fmt: skip
    rest = settings(heads, output_final_state=True, cu_seqlens=starts)
    return {name: t.to(device, dtype) for name, t in tensors.items()} | rest


def by_parts(
    x, weight, *, num_k_heads, num_v_heads, head_k_dim, head_v_dim, eps=1e-6, use_qk_l2norm=True,
    activation="silu", norm=npu_ops.l2norm, **rest,
):  # fmt: skip
    """Compute the op as causal_conv1d, split, l2norm."""
    y, state = npu_ops.causal_conv1d(x, weight, activation=activation, **rest)
    keys = num_k_heads * head_k_dim
    q, k, v = y.split([keys, keys, num_v_heads * head_v_dim], dim=-1)
    q, k = (part.unflatten(-1, (num_k_heads, head_k_dim)) for part in (q, k))
    if use_qk_l2norm:
        q, k = norm(q, eps=eps), norm(k, eps=eps)
    return q, k, v.unflatten(-1, (num_v_heads, head_v_dim)), state


# Results, compared with the reference


@pytest.mark.parametrize("case", [c for c in CASES if max(c.heads) < 128 and c.tokens], ids=str)
def test_reference_is_the_parts(case):
    """The reference equals convolution, split and l2norm, with our l2norm and transformers'."""
    inputs = case.inputs(torch.float64)
    wrt = [name for name in DIFFERENTIABLE if name in inputs]
    actual = run("reference", inputs)
    support.assert_all_close(actual, support.evaluate(by_parts, inputs, wrt), FP64)

    def theirs(**inputs):
        return by_parts(**inputs, norm=qwen3_next.l2norm)

    support.assert_all_close(actual, support.evaluate(theirs, inputs, wrt), FP64)


@IMPLEMENTATIONS
@support.parametrize_dtypes()
@pytest.mark.parametrize("lengths", [None, [3, 0, 1, 40]], ids=["batch", "packed"])
def test_it_is_causal_conv1d_then_split_then_l2norm(lengths, dtype, implementation, device):
    """v and the final state are bit-equal; q and k differ, as the fused op rounds once less."""
    inputs = random_inputs(44, lengths=lengths, dtype=dtype, device=device)
    ours = run(implementation, inputs)
    both = (*OPS, "causal_conv1d", "l2norm")
    with support.forced(implementation, *both):
        parts = support.evaluate(by_parts, inputs, DIFFERENTIABLE)
    assert torch.equal(ours["output 2"], parts["output 2"])
    assert torch.equal(ours["output 3"], parts["output 3"])
    # The separate ops also round the gradient of the convolution's output. It is four times as
    # large as the gradient of the convolution's input.
    tolerances = support.twice(support.twice(TOLERANCES))
    support.assert_all_close(
        ours, {name: value.double() for name, value in parts.items()}, tolerances
    )


@IMPLEMENTATIONS
def test_it_is_what_qwen3_next_gives_to_the_delta_rule(implementation, device, monkeypatch):
    """Compare with the tensors inside transformers' layer."""
    config = qwen3_next.Qwen3NextConfig(
        hidden_size=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=24,
        linear_value_head_dim=16, num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    layer = qwen3_next.Qwen3NextGatedDeltaNet(config, 0)
    seen = {}
    convolve, rule = qwen3_next.causal_conv1d_fn, qwen3_next.torch_chunk_gated_delta_rule

    def recorded_convolution(x, *rest, **options):
        seen["x"] = x.detach().mT
        return convolve(x, *rest, **options)

    def recorded_rule(q, k, v, **options):
        seen["qkv"] = qwen3_next.l2norm(q), qwen3_next.l2norm(k), v
        return rule(q, k, v, **options)

    monkeypatch.setattr(qwen3_next, "causal_conv1d_fn", recorded_convolution)
    monkeypatch.setattr(qwen3_next, "torch_chunk_gated_delta_rule", recorded_rule)
    layer(torch.randn(2, 21, 32))
    weight = layer.conv1d.weight.squeeze(1)
    with support.forced(implementation, *OPS):
        *ours, _ = npu_ops.causal_conv1d_qkv(
            seen["x"].to(device), weight.to(device), activation=layer.activation,
            **settings((2, 4, 24, 16)),
        )  # fmt: skip
    for actual, expected in zip(ours, seen["qkv"], strict=True):
        torch.testing.assert_close(actual.cpu(), expected)


@IMPLEMENTATIONS
@support.parametrize_dtypes()
def test_heads_have_norm_one(dtype, implementation, device):
    inputs = random_inputs(20, dtype=dtype, device=device)
    with support.forced(implementation, *OPS):
        q, k, _, _ = npu_ops.causal_conv1d_qkv(**inputs, eps=0.0)
    norms = torch.stack([q, k]).double().norm(dim=-1)
    torch.testing.assert_close(
        norms, torch.ones_like(norms), rtol=0, atol=TOLERANCES[dtype].max_abs
    )


@IMPLEMENTATIONS
@pytest.mark.parametrize("value", [0.0, 1e-4, 300.0])
def test_eps_is_inside_the_root(value, implementation, device):
    """Test rows of zeros, rows far below eps, and fp16 values whose squares overflow."""
    dtype = torch.float16
    x = torch.full((1, 5, channels(HEADS)), value, dtype=dtype, device=device)
    weight = torch.ones(channels(HEADS), 2, dtype=dtype, device=device)
    with support.forced(implementation, *OPS):
        q, k, _, _ = npu_ops.causal_conv1d_qkv(
            x, weight, activation=None, eps=0.01, **settings(HEADS)
        )
    wide = x.double() * torch.tensor([1.0, 2, 2, 2, 2], device=device)[:, None]
    expected = wide * (24 * wide.square() + 0.01).rsqrt()
    expected = expected[..., :48].unflatten(-1, (2, 24))
    for part in (q, k):
        torch.testing.assert_close(part.double(), expected, rtol=1e-3, atol=0)


@IMPLEMENTATIONS
def test_a_nan_stays_with_its_head_and_the_tokens_behind_it(implementation, device):
    inputs = random_inputs(lengths=[6, 9], width=3, dtype=torch.float32, device=device)
    inputs["x"][0, 4, 50] = float("nan")  # in the first key head
    with support.forced(implementation, *OPS):
        q, k, v, _ = npu_ops.causal_conv1d_qkv(**inputs)
    expected = torch.zeros_like(k, dtype=torch.bool)
    expected[0, 4:6, 0] = True
    assert torch.equal(k.isnan(), expected) and not q.isnan().any() and not v.isnan().any()


# Properties


@IMPLEMENTATIONS
@pytest.mark.parametrize("lengths", [[3, 7, 1, 40], [0, 5, 0, 0, 2], [1] * 9], ids=str)
def test_packed_equals_one_by_one(lengths, implementation, device):
    inputs = random_inputs(lengths=lengths, width=3, dtype=torch.float32, device=device)
    with support.forced(implementation, *OPS):
        packed = npu_ops.causal_conv1d_qkv(**inputs)
        parts = []
        for n, (start, stop) in enumerate(itertools.pairwise(inputs["cu_seqlens"].tolist())):
            state = inputs["initial_state"][n : n + 1]
            one = {"x": inputs["x"][:, start:stop], "initial_state": state, "cu_seqlens": None}
            parts.append(npu_ops.causal_conv1d_qkv(**inputs | one))
    for number, whole in enumerate(packed):
        alone = torch.cat([part[number] for part in parts], dim=0 if number == 3 else 1)
        torch.testing.assert_close(whole, alone, rtol=1e-6, atol=1e-6)


@IMPLEMENTATIONS
@pytest.mark.parametrize("cut", [0, 2, 39])
def test_a_carried_state_continues_the_sequence(cut, implementation, device):
    inputs = random_inputs(tokens=40, batch=2, dtype=torch.bfloat16, device=device)
    with support.forced(implementation, *OPS):
        whole = npu_ops.causal_conv1d_qkv(**inputs)
        state, parts = inputs["initial_state"], []
        for span in (slice(cut), slice(cut, None)):
            one = {"x": inputs["x"][:, span], "initial_state": state}
            *qkv, state = npu_ops.causal_conv1d_qkv(**inputs | one)
            parts.append(qkv)
    for number in range(3):
        assert torch.equal(torch.cat([part[number] for part in parts], dim=1), whole[number])
    assert torch.equal(state, whole[3])


@IMPLEMENTATIONS
@pytest.mark.parametrize("lengths", [None, [3, 0, 2, 30]], ids=["batch", "packed"])
def test_strided_x_is_read_in_place(lengths, implementation, device):
    """x is a slice of a fused projection; outputs and gradients are those of a contiguous copy."""
    inputs = random_inputs(tokens=35, lengths=lengths, dtype=torch.float32, device=device)
    width = channels(HEADS)
    inputs["x"] = torch.randn(1, 35, 3 * width, device=device)[..., width : 2 * width]
    in_place = inputs | {
        "initial_state": None, "weight": torch.ones(4, width, device=device).t()
    }  # fmt: skip
    with support.copies() as seen, support.forced(implementation, *OPS):
        npu_ops.causal_conv1d_qkv(**in_place)
    if implementation == "cpu":
        assert seen.operators == []
    actual = run(implementation, inputs)
    dense = run(implementation, inputs | {"x": inputs["x"].contiguous()})
    support.assert_same_bits(actual, dense)


@pytest.mark.parametrize("make", [
    lambda d: torch.randn(7, 2, d).transpose(0, 1), lambda d: torch.randn(2, d, 7).transpose(1, 2),
    lambda d: torch.randn(7, d).expand(2, 7, d),
], ids=["TBD", "BDT", "expanded"])  # fmt: skip
def test_any_strides(make):
    x, weight = make(channels(HEADS)), torch.randn(2 * channels(HEADS), 4)[::2]
    rest = settings(HEADS)
    actual = run("cpu", {"x": x, "weight": weight} | rest)
    wide = {"x": x.double().contiguous(), "weight": weight.double()}
    support.assert_all_close(actual, run("reference", wide | rest), TOLERANCES)


@IMPLEMENTATIONS
def test_gradients_may_have_any_strides(implementation, device):
    inputs = random_inputs(11, dtype=torch.float32, device=device)
    x = inputs["x"].requires_grad_()
    with support.forced(implementation, *OPS):
        outputs = npu_ops.causal_conv1d_qkv(**inputs)[:3]
        grads = [torch.randn_like(out) for out in outputs]
        strided = [grad.transpose(1, 2).contiguous().transpose(1, 2) for grad in grads]
        (expected,) = torch.autograd.grad(outputs, x, grads, retain_graph=True)
        (actual,) = torch.autograd.grad(outputs, x, strided)
    assert torch.equal(actual, expected)


def test_gradients_side_by_side_are_read_where_they_are():
    inputs = random_inputs(dtype=torch.float32)
    sizes = [HEADS[0] * HEADS[2]] * 2 + [HEADS[1] * HEADS[3]]
    parts = torch.randn(1, 9, sum(sizes)).split(sizes, dim=-1)
    grads = [g.unflatten(-1, s) for g, s in zip(parts, reference.shapes(HEADS), strict=True)]
    with support.copies() as seen:
        torch.ops.npu_ops.causal_conv1d_qkv_backward(
            *grads, None, inputs["x"], inputs["weight"], None, None, None, True, 1e-6, HEADS
        )
    assert seen.operators == []


def test_empty():
    inputs = random_inputs(lengths=[0, 0], dtype=torch.float32)
    x, state = (inputs[name].requires_grad_() for name in ("x", "initial_state"))
    q, k, v, last = npu_ops.causal_conv1d_qkv(**inputs)
    assert q.shape == k.shape == (1, 0, 2, 24) and v.shape == (1, 0, 3, 16)
    assert torch.equal(last, state)
    (last * 3).sum().backward()
    assert torch.equal(state.grad, torch.full_like(state, 3)) and x.grad.shape == x.shape


# The gradients


@pytest.mark.parametrize("lengths", [None, [1, 0, 4]], ids=["batch", "packed"])
@pytest.mark.parametrize("activation", ["swish", None])
@pytest.mark.parametrize("normalised", [True, False])
def test_gradcheck(lengths, activation, normalised):
    inputs = random_inputs(5, (1, 2, 3, 2), 3, lengths)
    inputs |= {"activation": activation, "use_qk_l2norm": normalised}
    assert torch.autograd.gradcheck(
        *support.function_of_leaves(npu_ops.causal_conv1d_qkv, inputs, DIFFERENTIABLE)
    )


@IMPLEMENTATIONS
def test_gradients_are_the_same_each_time(implementation, device):
    inputs = random_inputs(1000, dtype=torch.bfloat16, device=device)
    support.assert_threads_change_nothing(lambda: run(implementation, inputs))


@pytest.mark.parametrize("number", range(4), ids=["q", "k", "v", "state"])
def test_an_output_that_nobody_uses_has_no_gradient(number):
    inputs = random_inputs(6, dtype=torch.float32)
    leaves = {name: inputs[name].requires_grad_() for name in DIFFERENTIABLE}

    def loss(function):
        out = function(**inputs)[number]
        return torch.autograd.grad(out.square().sum(), list(leaves.values()), allow_unused=True)

    pairs = zip(loss(npu_ops.causal_conv1d_qkv), loss(by_parts), strict=True)
    for actual, expected in pairs:
        if expected is None:
            assert actual is None or not actual.any()
        else:
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_memory_is_the_outputs_alone():
    """No intermediate result is allocated, forward or backward."""
    heads = (4, 8, 32, 32)
    inputs = settings(heads)
    x = torch.randn(1, 512, channels(heads)).bfloat16().requires_grad_()
    weight = torch.randn(channels(heads), 4).bfloat16()
    size = x.numel() * 2
    with support.copies() as forward:
        outputs = npu_ops.causal_conv1d_qkv(x, weight, **inputs)[:3]
    grads = [torch.randn_like(out) for out in outputs]
    with support.copies() as backward:
        torch.autograd.grad(outputs, x, grads)
    assert size <= forward.allocated < size + 10_000
    assert size <= backward.allocated < size + 20_000


# Support for torch.compile, autograd and other features of torch


@support.parametrize_dtypes(torch.float64)
@pytest.mark.parametrize("lengths", [None, [3, 0, 4]], ids=["batch", "packed"])
@pytest.mark.parametrize("everything", [True, False])
def test_opcheck(dtype, lengths, everything):
    inputs = random_inputs(7, lengths=lengths, dtype=dtype)
    tensors = [inputs[name] for name in DIFFERENTIABLE]
    if not everything:
        tensors[2:] = None, None
    for tensor in tensors:
        if tensor is not None:
            tensor.requires_grad_()
    eps = 1e-6 if everything else None
    args = (*tensors, inputs["cu_seqlens"], True, eps, list(HEADS), everything)
    torch.library.opcheck(torch.ops.npu_ops.causal_conv1d_qkv.default, args)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("lengths", [None, [3, 0, 4]], ids=["batch", "packed"])
def test_compile(backend, lengths):
    inputs = random_inputs(7, lengths=lengths, dtype=torch.float32)

    def function(x, **rest):
        q, k, v, state = npu_ops.causal_conv1d_qkv(x.sin(), **rest)
        return q.cos(), k, v, state

    support.assert_compiled_is_eager(
        *support.function_of_leaves(function, inputs, DIFFERENTIABLE), backend
    )


@pytest.mark.parametrize("make", [
    lambda d: torch.randn(2, 6, d), lambda d: torch.randn(6, 2, d).transpose(0, 1),
    lambda d: torch.randn(2, d, 6).transpose(1, 2),
    lambda d: torch.randn(2, 6, 3 * d)[..., d : 2 * d], lambda d: torch.randn(2, 0, d),
], ids=["dense", "TBD", "BDT", "slice", "empty"])  # fmt: skip
def test_fake_is_like_real(make):
    """Results and gradients have the shape, strides and dtype of real ones."""

    @support.with_gradients
    def function(x, weight, state):
        rest = settings(HEADS, output_final_state=True)
        return npu_ops.causal_conv1d_qkv(x, weight, initial_state=state, **rest)

    width = channels(HEADS)
    support.assert_fake_is_like_real(
        function, make(width), torch.randn(width, 3), torch.randn(2, width, 3)
    )


# Invalid calls


WIDTH = channels(HEADS)
X, WEIGHT = torch.randn(1, 6, WIDTH), torch.randn(WIDTH, 4)


def test_an_unknown_argument_is_named():
    with pytest.raises(TypeError, match="residual"):
        npu_ops.causal_conv1d_qkv(X, WEIGHT, residual=X, **settings(HEADS))


def test_the_kernel_checks_cu_seqlens_again():
    """A compiled call skips the public function's checks."""
    args = (X, WEIGHT, None, None, torch.tensor([0, 9]), False, None, list(HEADS), False)
    with pytest.raises(ValueError, match="cu_seqlens: got 0 first and 9 last, needs 0 and up to 6"):
        torch.ops.npu_ops.causal_conv1d_qkv(*args)


def test_explain():
    def chosen(x):
        verdicts = npu_ops.explain("causal_conv1d_qkv", x, WEIGHT, **settings(HEADS))
        return [v.implementation for v in verdicts if v.why_not is None]

    assert chosen(X) == ["cpu"] and chosen(X.double()) == ["reference"]
