"""The recurrent gated delta rule: against the reference, others' formulas and what it must be."""

import functools

import pytest
import torch
from delta_rule_calls import (
    assert_compiled_case_is_eager,
    assert_fake_case_is_like_real,
    assert_flags_are_what_they_say,
    assert_gradients_are_right,
)
from support import (
    assert_all_close,
    evaluate,
    every_implementation,
    exact,
    floats,
    forced,
    named,
    on_device,
    threads,
)
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

import npu_ops
from npu_ops.core import env
from npu_ops.core.compare import Tolerance, assert_close
from npu_ops.ops.fused_recurrent_gated_delta_rule import op
from npu_ops.ops.fused_recurrent_gated_delta_rule.cases import CASES, DIFFERENTIABLE, TOLERANCES

OP = "fused_recurrent_gated_delta_rule"
FP32 = TOLERANCES[torch.float32]
IMPLEMENTATIONS = every_implementation(op.forward)
delta_rule = npu_ops.fused_recurrent_gated_delta_rule


def run(implementation, inputs, wrt=None):
    """The outputs, and gradients of everything that is there."""
    wrt = DIFFERENTIABLE if wrt is None else wrt
    with forced(implementation, OP):
        return evaluate(delta_rule, inputs, tuple(n for n in wrt if inputs.get(n) is not None))


def compare(inputs, implementation, device, tolerances=TOLERANCES):
    """With the reference in fp64; returns what was computed."""
    expected = run("reference", floats(inputs, torch.float64))
    actual = run(implementation, on_device(inputs, device))
    assert_all_close(actual, expected, tolerances)
    return actual


def qkv(batch=1, tokens=9, heads=1, value_heads=2, keys=8, values=6, dtype=torch.float32, seed=0):
    """Arguments by name, with a decay, beta and a state."""
    draw = torch.Generator().manual_seed(seed)
    normal = functools.partial(torch.randn, generator=draw)
    q, k = (torch.nn.functional.normalize(normal(batch, tokens, heads, keys), dim=-1) for _ in "qk")
    return {
        "q": q.to(dtype),
        "k": k.to(dtype),
        "v": normal(batch, tokens, value_heads, values).to(dtype),
        "g": -normal(batch, tokens, value_heads).abs() / 4,
        "beta": normal(batch, tokens, value_heads).sigmoid(),
        "initial_state": normal(batch, value_heads, keys, values),
        "output_final_state": True,
    }


# The values


def by_matrices(q, k, v, g, beta, initial_state, scale):
    """One head, as the paper has it: S = alpha (I - beta k k^T) S + beta k v^T, in fp64."""
    state, outputs = initial_state.double(), []
    eye = torch.eye(k.shape[-1], dtype=torch.float64)
    for t in range(q.shape[0]):
        forget = eye - beta[t] * torch.outer(k[t], k[t])
        state = g[t].exp() * forget @ state + beta[t] * torch.outer(k[t], v[t])
        outputs.append(state.T @ q[t] * scale)
    return torch.stack(outputs), state


@IMPLEMENTATIONS
def test_against_the_paper(implementation, device):
    inputs = qkv(2, 11, 2, 4)
    with forced(implementation, OP):
        o, final = delta_rule(**on_device(inputs, device), scale=0.3)
    wide = floats(inputs, torch.float64)
    for n in range(2):
        for head in range(4):
            expected = by_matrices(
                *(wide[name][n, :, head // 2] for name in ("q", "k")),
                *(wide[name][n, :, head] for name in ("v", "g", "beta")),
                wide["initial_state"][n, head], 0.3,
            )  # fmt: skip
            assert_close("o", o[n, :, head].cpu(), expected[0], FP32)
            assert_close("state", final[n, head].cpu(), expected[1], FP32)


def hugging_face(function, q, k, v, g, beta, initial_state, **settings):
    return function(
        q, k, v, g=g, beta=beta, initial_state=initial_state, output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_against_transformers(form):
    """Values and gradients, that of the final state included."""
    theirs = getattr(qwen3_5, f"torch_{form}_gated_delta_rule").__wrapped__
    inputs = qkv(2, 70, 2, 4, 16, 16)
    wrt = ("q", "k", "v", "g", "beta", "initial_state")
    expected = evaluate(functools.partial(hugging_face, theirs), inputs, wrt)
    actual = evaluate(delta_rule, inputs | {"use_qk_l2norm_in_kernel": True}, wrt)
    assert_all_close(actual, expected, {torch.float32: Tolerance(2e-5, 2e-5)})


# Hard numbers


@IMPLEMENTATIONS
@pytest.mark.parametrize("gate", [0.0, -1e-4, -1.0])
def test_correlated_keys(gate, implementation, device):
    """All keys are positive, so each token undoes much of what the others wrote."""
    tokens = 256 if device == "cpu" and implementation == "cpu" else 40
    inputs = qkv(1, tokens, 1, 1, 32, 32)
    for name in ("q", "k"):
        inputs[name] = torch.nn.functional.normalize(torch.rand(inputs[name].shape), dim=-1)
    inputs["g"] = torch.full_like(inputs["g"], gate)
    compare(inputs, implementation, device)


@IMPLEMENTATIONS
@pytest.mark.parametrize("gate", [-80.0, -1e4, float("-inf")])
def test_a_decay_to_nothing(gate, implementation, device):
    """The state is gone and nothing is NaN: each token reads what it wrote itself."""
    inputs = qkv(1, 9, 1, 2) | {"scale": 1.0}
    inputs["g"] = torch.full_like(inputs["g"], gate)
    actual = run(implementation, on_device(inputs, device))
    assert all(value.isfinite().all() for value in actual.values())
    match = (inputs["q"] * inputs["k"]).sum(-1, keepdim=True)
    expected = match * inputs["beta"][..., None] * inputs["v"]
    assert_close("o", actual["output 0"].cpu(), expected, Tolerance(1e-6, 1e-6))
    assert not actual["gradient of g"].any() or gate == -80.0


@IMPLEMENTATIONS
def test_large_values_in_bf16(implementation, device):
    """The state is fp32: it holds what fp16 cannot."""
    inputs = qkv(1, 9, dtype=torch.bfloat16)
    inputs["v"] = inputs["v"] * 1e30
    with forced(implementation, OP):
        o, final = delta_rule(**on_device(inputs, device))
    assert final.dtype == torch.float32 and o.isfinite().all() and final.abs().max() > 1e29


# What it must be


@IMPLEMENTATIONS
def test_a_memory_returns_what_was_written(implementation, device):
    """Orthonormal keys, beta 1, no decay: q = k_i reads v_i."""
    keys = torch.eye(6)[None, :, None]
    v = torch.randn(1, 6, 2, 5)
    q = keys.flip(1)
    with forced(implementation, OP):
        o, final = delta_rule(
            *(x.to(device) for x in (q, keys, v)), scale=1.0, output_final_state=True
        )
    assert_close("state", final[0].cpu(), v[0].transpose(0, 1), Tolerance(1e-7, 1e-7))
    expected = torch.where(torch.arange(6)[:, None, None] >= 3, v[0].flip(0), 0.0)
    assert_close("o", o[0].cpu(), expected, Tolerance(1e-7, 1e-7))


@IMPLEMENTATIONS
@pytest.mark.parametrize("cut", [1, 4, 8])
def test_two_parts_are_the_whole(cut, implementation, device):
    inputs = on_device(qkv(2, 9, 1, 2), device)
    by_token = ("q", "k", "v", "g", "beta")
    with forced(implementation, OP):
        whole, final = delta_rule(**inputs)
        one, state = delta_rule(**inputs | {n: inputs[n][:, :cut] for n in by_token})
        two, last = delta_rule(
            **inputs | {n: inputs[n][:, cut:] for n in by_token} | {"initial_state": state}
        )
    assert_close("o", torch.cat([one, two], 1), whole, Tolerance(1e-6, 1e-6))
    assert_close("state", last, final, Tolerance(1e-6, 1e-6))


@IMPLEMENTATIONS
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=named)
def test_packed_is_one_by_one(index, implementation, device):
    """Empty sequences included, whose states pass through; and so for the gradients."""
    starts = [0, 0, 3, 3, 8, 9, 9]
    inputs = qkv(1, 9, 1, 2)
    inputs["initial_state"] = torch.randn(6, 2, 8, 6)
    inputs["cu_seqlens"] = torch.tensor(starts, dtype=index)
    actual = {n: x.cpu() for n, x in run(implementation, on_device(inputs, device)).items()}
    by_token = ("q", "k", "v", "g", "beta")
    grad_o, grad_state = exact(actual["output 0"], 7), exact(actual["output 1"], 8)
    for n, (begin, end) in enumerate(zip(starts, starts[1:], strict=False)):
        if begin == end:
            assert torch.equal(actual["output 1"][n], inputs["initial_state"][n])
            assert torch.equal(actual["gradient of initial_state"][n], grad_state[n])
            continue
        alone = {name: inputs[name][:, begin:end].clone().requires_grad_() for name in by_token}
        state = inputs["initial_state"][n : n + 1].clone().requires_grad_()
        with forced("reference", OP):
            o, final = delta_rule(**alone, initial_state=state, output_final_state=True)
            grads = torch.autograd.grad(
                (o, final), (*alone.values(), state), (grad_o[:, begin:end], grad_state[n : n + 1])
            )
        assert_close("o", actual["output 0"][:, begin:end], o, FP32)
        assert_close("state", actual["output 1"][n : n + 1], final, FP32)
        for name, grad in zip(by_token, grads, strict=False):
            assert_close(name, actual[f"gradient of {name}"][:, begin:end], grad, FP32)
        assert_close("dh0", actual["gradient of initial_state"][n : n + 1], grads[-1], FP32)


@IMPLEMENTATIONS
def test_state_layouts_are_transposes(implementation, device):
    """Also where K is V, which hides a mistake from shapes."""
    for values in (6, 8):
        inputs = on_device(qkv(1, 5, 1, 2, 8, values), device)
        turned = inputs["initial_state"].transpose(-1, -2).contiguous()
        with forced(implementation, OP):
            o, final = delta_rule(**inputs)
            o2, final2 = delta_rule(**inputs | {"initial_state": turned, "state_v_first": True})
        assert_close("o", o2, o, Tolerance(1e-6, 1e-6))
        assert_close("state", final2.transpose(-1, -2), final, Tolerance(1e-6, 1e-6))


@IMPLEMENTATIONS
def test_ways_to_say_the_same(implementation, device):
    """A gate or beta for all is one by key or value that does not vary; heads may be repeated."""
    inputs = on_device(qkv(1, 7, 1, 2), device)
    g, beta = inputs["g"], inputs["beta"]
    same = [
        {"g": None, "gk": g[..., None].expand(1, 7, 2, 8)},
        {"g": None, "gv": g[..., None].expand(1, 7, 2, 6)},
        {"g": g / 2, "gk": (g / 2)[..., None].expand(1, 7, 2, 8)},
        {"beta": beta[..., None].expand(1, 7, 2, 6)},
        {name: inputs[name].repeat_interleave(2, 2) for name in ("q", "k")},
        {"scale": 8**-0.5},
    ]
    with forced(implementation, OP):
        expected = delta_rule(**inputs)
        for changes in same:
            for a, e in zip(delta_rule(**inputs | changes), expected, strict=True):
                assert_close(str(list(changes)), a, e, Tolerance(1e-6, 1e-6))
        ones = delta_rule(**inputs | {"beta": None})
        for a, e in zip(ones, delta_rule(**inputs | {"beta": torch.ones_like(beta)}), strict=True):
            assert torch.equal(a, e)


def test_flags_are_what_they_say():
    inputs = qkv(1, 7, 1, 2)
    assert_flags_are_what_they_say(delta_rule, inputs, Tolerance(1e-6, 1e-6))


def test_no_final_state_unless_wanted():
    inputs = qkv() | {"output_final_state": False}
    o, final = delta_rule(**inputs)
    assert final is None and torch.equal(o, delta_rule(**inputs | {"output_final_state": True})[0])


@IMPLEMENTATIONS
def test_strided_inputs(implementation, device):
    inputs = on_device(qkv(2, 5, 1, 2), device)
    strided = inputs | {
        name: inputs[name].transpose(0, 1).contiguous().transpose(0, 1)
        for name in ("q", "k", "v", "g", "beta", "initial_state")
    }
    for name, value in run(implementation, strided).items():
        assert torch.equal(value, run(implementation, inputs)[name])


@IMPLEMENTATIONS
def test_the_same_each_time(implementation, device):
    inputs = on_device(qkv(2, 20, 2, 4, 8, 70), device)
    first = run(implementation, inputs)
    with threads(2):
        second = run(implementation, inputs)
    assert all(torch.equal(first[name], second[name]) for name in first)


# As a torch operator


def operator_inputs(packed=True):
    """What the operator takes, of six tokens: two sequences, or one with every gate."""
    case = next(c for c in CASES if c.name == ("packed" if packed else "all-gates"))
    given = floats(case.inputs(torch.float64), torch.float64)
    tensors = [given[n] for n in ("q", "k", "v", "g", "gk", "gv", "beta")]
    tensors = [None if x is None else x[:, :6].contiguous() for x in tensors]
    tensors[-1] = tensors[-1].view(*tensors[2].shape[:3], -1)
    tensors.append(given["initial_state"][: 2 if packed else 1].clone())
    leaves = [None if x is None else x.requires_grad_() for x in tensors]
    return [*leaves, torch.tensor([0, 2, 6]) if packed else None, 0.5, False]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("wanted", [True, False])
def test_opcheck(packed, wanted):
    inputs = [*operator_inputs(packed=packed), wanted]
    torch.library.opcheck(torch.ops.npu_ops.fused_recurrent_gated_delta_rule.default, inputs)


def test_opcheck_backward():
    inputs = [x.detach() if isinstance(x, torch.Tensor) else x for x in operator_inputs()]
    o, final = torch.ops.npu_ops.fused_recurrent_gated_delta_rule(*inputs, True)
    torch.library.opcheck(
        torch.ops.npu_ops.fused_recurrent_gated_delta_rule_backward.default, [o, final, *inputs]
    )


def case_named(name):
    return next(case for case in CASES if case.name == name)


@pytest.mark.parametrize("name", ["packed-v-first", "all-gates", "key-gate", "flags", "one-key"])
def test_gradcheck(name):
    """The reference's gradient, which the kernels' are compared with."""
    by_token = ("q", "k", "v", "g", "gk", "gv", "beta")
    assert_gradients_are_right(delta_rule, case_named(name), DIFFERENTIABLE, by_token, 5)


@pytest.mark.parametrize("name", ["packed-v-first", "dense"])
def test_compile(name):
    assert_compiled_case_is_eager(delta_rule, case_named(name), DIFFERENTIABLE)


@pytest.mark.parametrize("name", ["packed", "all-gates-v-first", "no-gates"])
def test_fake_is_like_real(name):
    assert_fake_case_is_like_real(delta_rule, case_named(name), DIFFERENTIABLE)


def test_strict_mode_runs_kernels():
    with env.override(strict=True):
        delta_rule(**qkv(dtype=torch.float16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_tokens_with_every_decay(dtype):
    """An empty sequence passes its state on."""
    q, v = torch.ones(1, 0, 1, 4, dtype=dtype), torch.ones(1, 0, 2, 3, dtype=dtype)
    gates = {"gk": torch.ones(1, 0, 2, 4, dtype=dtype), "gv": torch.ones_like(v)}
    state = torch.randn(1, 2, 4, 3, dtype=dtype)
    o, final = npu_ops.fused_recurrent_gated_delta_rule(
        q, q, v, **gates, initial_state=state, output_final_state=True,
        cu_seqlens=torch.tensor([0, 0]),
    )  # fmt: skip
    assert o.shape == v.shape and torch.equal(final, state)
