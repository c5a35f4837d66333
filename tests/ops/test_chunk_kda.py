"""Kimi Delta Attention against fla's recurrence and ours, also under strong decays."""

import math

import pytest
import torch
from npu_ops_tools.bench.peers import fla_naive
from support import (
    assert_all_close,
    evaluate,
    every_implementation,
    floats,
    forced,
    on_device,
    runner,
)

import npu_ops
from npu_ops.core import env
from npu_ops.core.compare import Tolerance, assert_close
from npu_ops.ops.chunk_kda import op
from npu_ops.ops.chunk_kda.cases import DIFFERENTIABLE, TOLERANCES

OP = "chunk_kda"
IMPLEMENTATIONS = every_implementation(op.forward)
WRT = ("q", "k", "v", "g", "beta", "initial_state")
run = runner(npu_ops.chunk_kda, OP, DIFFERENTIABLE)


def call(batch=1, tokens=40, heads=1, value_heads=2, keys=16, values=24, strong=0.25, seed=0):
    """Return arguments by name. strong: the size of the log decays."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=draw)

    q, k = (torch.nn.functional.normalize(normal(batch, tokens, heads, keys), dim=-1) for _ in "qk")
    return {
        "q": q, "k": k, "v": normal(batch, tokens, value_heads, values),
        "g": -strong * normal(batch, tokens, value_heads, keys).abs(),
        "beta": normal(batch, tokens, value_heads).sigmoid(),
        "initial_state": normal(batch, value_heads, keys, values), "output_final_state": True,
        "chunk_size": 16,
    }  # fmt: skip


def of_fla(q, k, v, g, beta, initial_state, output_final_state, chunk_size):
    naive = fla_naive("naive_recurrent_kda", "kda")
    return naive(q, k, v, g, beta, None, initial_state, output_final_state)


@IMPLEMENTATIONS
@pytest.mark.parametrize("strong", [0.01, 0.25, 3.0])
def test_against_fla(strong, implementation, device):
    """Compare outputs and gradients. 40 tokens are two and a half chunks."""
    inputs = call(2, strong=strong)
    expected = evaluate(of_fla, inputs, WRT)
    actual = run(implementation, on_device(inputs, device))
    assert_all_close(actual, expected, {torch.float32: Tolerance(1e-5, 1e-5)})


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decay", [-30.0, -200.0, "some channels", "some tokens"])
def test_strong_decays(decay, dtype, implementation, device):
    """Cumulative log decays of a chunk reach -12800, which must give no inf or NaN."""
    inputs = call(tokens=70) | {"chunk_size": 64}
    if decay == "some channels":
        inputs["g"][..., ::3] = -30.0
    elif decay == "some tokens":
        inputs["g"][:, ::7] = -30.0
    else:
        inputs["g"].fill_(decay)
    for name in ("q", "k", "v"):
        inputs[name] = inputs[name].to(dtype)
    expected = run("reference", floats(inputs, torch.float64))
    actual = run(implementation, on_device(inputs, device))
    for name, value in actual.items():
        assert value.isfinite().all(), name
        if expected[name].abs().max() < 1e-38:  # too small for fp32
            assert value.abs().max() < 1e-30, name
        else:
            assert_close(name, value.cpu(), expected[name], TOLERANCES[dtype])


@IMPLEMENTATIONS
def test_a_decay_to_nothing(implementation, device):
    """A g of -inf erases a channel of the state, as exp(-inf) is 0."""
    inputs = call(tokens=20)
    inputs["g"][:, 5] = -math.inf
    inputs["g"][:, 11, :, ::2] = -math.inf
    with torch.no_grad():
        with forced("reference", OP):
            expected = npu_ops.chunk_kda(**floats(inputs, torch.float64))
        with forced(implementation, OP):
            actual = npu_ops.chunk_kda(**on_device(inputs, device))
    for name, value, right in zip(("o", "final_state"), actual, expected, strict=True):
        assert_close(name, value.cpu(), right, TOLERANCES[torch.float32])


@IMPLEMENTATIONS
def test_growing_channels(implementation, device):
    """A g above 0 lets a channel grow."""
    inputs = call(tokens=20)
    inputs["g"] = -inputs["g"] / 4
    expected = run("reference", floats(inputs, torch.float64))
    assert_all_close(run(implementation, on_device(inputs, device)), expected, TOLERANCES)


@IMPLEMENTATIONS
def test_one_decay_for_all_keys_is_the_gated_delta_rule(implementation, device):
    inputs = call(2)
    g = inputs["g"][..., 0]
    inputs["g"] = g[..., None].expand_as(inputs["g"]).contiguous()
    actual = run(implementation, on_device(inputs, device))
    rule = runner(npu_ops.chunk_gated_delta_rule, "chunk_gated_delta_rule", DIFFERENTIABLE)
    expected = rule("reference", floats(inputs | {"g": g}, torch.float64))
    actual["gradient of g"] = actual["gradient of g"].sum(-1)
    assert_all_close(actual, expected, {torch.float32: Tolerance(2e-5, 2e-5)})


def test_chunks_of_one_token_are_the_recurrent_rule():
    """chunk_size=1 and NPU_OPS_CONSISTENT give the bits of fused_recurrent_gated_delta_rule."""
    inputs = call(2)
    del inputs["chunk_size"]
    gates = {"gk": inputs["g"], "g": None}
    expected = npu_ops.fused_recurrent_gated_delta_rule(**inputs | gates)
    by_one = npu_ops.chunk_kda(**inputs, chunk_size=1)
    with env.override(consistent="tokens"):
        consistent = npu_ops.chunk_kda(**inputs)
    for right, *found in zip(expected, by_one, consistent, strict=True):
        assert all(torch.equal(value, right) for value in found)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("has_bias", [False, True])
def test_gates_are_fla_s(lower_bound, has_bias):
    """A Kimi Linear layer passes its raw gate and beta; results and gradients equal fla's."""
    inputs = call(2)
    raw, logits = torch.randn_like(inputs["g"]), torch.randn_like(inputs["beta"])
    A_log, dt_bias = torch.randn(2), torch.randn(2 * 16) if has_bias else None
    flags = {
        "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "g": raw, "beta": logits,
        "A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound,
    }  # fmt: skip

    def composed(g, beta, A_log, dt_bias=None, **rest):
        x = g if dt_bias is None else g + dt_bias.view(2, 16)
        rate = A_log.exp()[:, None]
        if lower_bound is None:
            g = -rate * torch.nn.functional.softplus(x)
        else:
            g = lower_bound * torch.sigmoid(rate * x)
        return npu_ops.chunk_kda(g=g, beta=beta.sigmoid(), **rest)

    wrt = ("q", "g", "beta", "A_log", *(["dt_bias"] if has_bias else []))
    actual = evaluate(npu_ops.chunk_kda, inputs | flags, wrt)
    plain = {n: x for n, x in flags.items() if n in ("g", "beta", "A_log", "dt_bias")}
    expected = evaluate(composed, inputs | plain, wrt)
    assert_all_close(actual, expected, {torch.float32: Tolerance(2e-6, 2e-6)})
