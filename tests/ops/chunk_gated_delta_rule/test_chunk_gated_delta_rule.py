"""The chunked gated delta rule against the recurrence, other implementations and its own
properties."""

import functools
import logging

import pytest
import torch
from chunk_calls import BY_TOKEN, OP, delta_rule, qkv, run
from delta_rule_calls import hugging_face
from support import (
    assert_all_close,
    evaluate,
    every_implementation,
    floats,
    forced,
    named,
    on_device,
    parametrize_cases,
    parametrize_dtypes,
    twice,
)
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

import npu_ops
from npu_ops.core import hardware, log
from npu_ops.core.compare import Tolerance, assert_close
from npu_ops.ops.chunk_gated_delta_rule import op
from npu_ops.ops.chunk_gated_delta_rule.cases import CASES, TOLERANCES

FP32 = TOLERANCES[torch.float32]
IMPLEMENTATIONS = every_implementation(op.forward)


def compare(inputs, implementation, device):
    """Compare with the recurrence in fp64, all tensors to the tolerance of the inputs' dtype."""
    expected = run("reference", floats(inputs, torch.float64))
    actual = run(implementation, on_device(inputs, device))
    tolerance = TOLERANCES[inputs["q"].dtype]
    assert_all_close(actual, expected, dict.fromkeys(TOLERANCES, tolerance))


# Results, compared with the reference


@pytest.mark.slow
@parametrize_cases(CASES, large=True)
def test_large_against_transformers(case):
    theirs = qwen3_5.torch_chunk_gated_delta_rule.__wrapped__
    inputs = case.inputs(torch.bfloat16) | {"use_qk_l2norm_in_kernel": True}
    wrt = (*BY_TOKEN, "initial_state")
    wide = floats(inputs, torch.float32)
    expected = evaluate(functools.partial(hugging_face, theirs), {n: wide[n] for n in wrt}, wrt)
    tolerance = twice(TOLERANCES)[torch.bfloat16]
    actual = evaluate(delta_rule, inputs, wrt)
    assert_all_close(actual, expected, dict.fromkeys(TOLERANCES, tolerance))


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
@pytest.mark.parametrize("tokens", [1, 16, 31, 130])
def test_a_chunk_changes_nothing(chunk_size, tokens):
    """Any chunk size gives the result of the recurrent op, which has kernels of its own."""
    inputs = qkv(2, tokens, 2, 4, correlated=True) | {"chunk_size": chunk_size}
    names = (*BY_TOKEN, "initial_state")
    actual = evaluate(delta_rule, inputs, names)
    del inputs["chunk_size"]
    expected = evaluate(npu_ops.fused_recurrent_gated_delta_rule, inputs, names)
    assert_all_close(actual, expected, {torch.float32: FP32})


# Inputs that are hard to compute with


def gates(kind, like):
    """Return log decays: all equal to `kind`, or "mixed", where a tenth erase the state."""
    if kind != "mixed":
        return torch.full_like(like, kind)
    forget = torch.rand(like.shape, generator=torch.Generator().manual_seed(1)) < 0.1
    return torch.where(forget, -1e4, -0.01)


@IMPLEMENTATIONS
@pytest.mark.parametrize("gate", [0.0, -1e-4, -1.0, "mixed"])
@pytest.mark.parametrize("correlated", [False, True])
def test_keys_and_gates(correlated, gate, implementation, device):
    """Correlated keys are all positive, so a token overwrites much of what earlier tokens wrote."""
    inputs = qkv(1, 100, correlated=correlated)
    inputs["g"] = gates(gate, inputs["g"])
    compare(inputs, implementation, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=named)
@pytest.mark.parametrize("gate", [0.0, -1e-3, -0.5, "mixed"])
def test_a_thousand_tokens(gate, dtype):
    inputs = qkv(1, 1030, correlated=True, dtype=dtype) | {"chunk_size": 64}
    inputs["g"] = gates(gate, inputs["g"])
    compare(inputs, "cpu", "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=named)
@pytest.mark.parametrize("gate", [0.0, -1e-3])
def test_sixteen_thousand_tokens(gate, dtype):
    inputs = qkv(1, 16411, correlated=True, dtype=dtype) | {"chunk_size": 64}
    inputs["g"] = gates(gate, inputs["g"])
    compare(inputs, "cpu", "cpu")


@IMPLEMENTATIONS
@pytest.mark.parametrize("gate", [-0.35, -40.0])
def test_gradients_of_gates_do_not_drown(gate, implementation, device):
    """Gradients of g are small differences of large terms; rounding must not dominate them."""
    inputs = qkv(1, 100, correlated=True, dtype=torch.bfloat16) | {"chunk_size": 64}
    inputs["g"] = torch.full_like(inputs["g"], gate)
    expected = run("reference", floats(inputs, torch.float64))["gradient of g"]
    actual = run(implementation, on_device(inputs, device))["gradient of g"].cpu()
    off = (actual - expected).norm()
    assert off < 6e-3 * expected.norm() or off < 1e-8


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=named)
def test_a_state_beyond_half(dtype, implementation, device):
    """The state is fp32, so it holds values that fp16 cannot; with a small scale o stays finite."""
    inputs = qkv(dtype=dtype) | {"scale": 1e-4}
    inputs["initial_state"] = inputs["initial_state"] * 1e6
    inputs["g"] = inputs["g"] / 100
    with forced("reference", OP):
        expected = delta_rule(**floats(inputs, torch.float64))
    with forced(implementation, OP):
        actual = delta_rule(**on_device(inputs, device))
    assert actual[1].abs().max() > 1e6
    for a, e in zip(actual, expected, strict=True):
        assert_close("output", a.cpu(), e, TOLERANCES[dtype])


# Norms


def not_normalized(dtype, tokens=100):
    """Return arguments with q and k as a projection leaves them: norms from 0.1 to 20."""
    inputs = qkv(1, tokens, dtype=dtype)
    lengths = torch.logspace(-1, 1.3, tokens, dtype=torch.float32)[:, None, None]
    inputs |= {"q": inputs["q"] * lengths, "k": inputs["k"] * lengths.flip(0)}
    inputs |= {name: inputs[name].to(dtype) for name in "qk"}
    return inputs | {"use_qk_l2norm_in_kernel": True}


def normalize_first(q, k, use_qk_l2norm_in_kernel, **rest):
    """Normalise q and k before the rule. In fp64 the extra rounding does not matter."""
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    return delta_rule(q, k, **rest)


def by_formula(inputs):
    with forced("reference", OP):
        wrt = (*BY_TOKEN, "initial_state")
        return evaluate(normalize_first, floats(inputs, torch.float64), wrt)


@pytest.mark.parametrize("tokens", [4, 100])
@IMPLEMENTATIONS
@parametrize_dtypes()
def test_norms(dtype, implementation, device, tokens):
    inputs = not_normalized(dtype, tokens)
    actual = run(implementation, on_device(inputs, device))
    tolerance = TOLERANCES[dtype]
    assert_all_close(actual, by_formula(inputs), dict.fromkeys(TOLERANCES, tolerance))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=named)
def test_what_is_normalized_is_not_rounded(dtype):
    """On the CPU only outputs are rounded: fp32 outputs are as exact as with fp32 inputs."""
    inputs = not_normalized(dtype)
    rounding = Tolerance(torch.finfo(dtype).eps / 4, torch.finfo(dtype).eps / 2)
    assert_all_close(run("cpu", inputs), by_formula(inputs), {torch.float32: FP32, dtype: rounding})


def test_a_prompt_leaves_what_decoding_does():
    """With bf16 q and k, o and the state equal those of `gated_delta_rule_update`
    token by token."""
    inputs = not_normalized(torch.bfloat16)
    draw = torch.Generator().manual_seed(2)
    A_log, dt_bias, b = (torch.randn(s, generator=draw) for s in ((2,), (2,), (1, 100, 2)))
    flags = {
        "use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias, "beta": b,
        "use_beta_sigmoid_in_kernel": True,
    }  # fmt: skip
    o, state = delta_rule(**inputs | flags)
    pool = inputs["initial_state"].clone()
    rows = tuple(inputs[name][0] for name in "qkv")
    decoded = npu_ops.gated_delta_rule_update(
        rows, inputs["g"][0], b[0], A_log, dt_bias, pool, torch.tensor([0]), state_v_first=False,
    )  # fmt: skip
    assert_close("state", state, pool, Tolerance(2e-6, 2e-6))
    # a few of the 4800 bf16 values round the other way
    assert_close("o", o[0], decoded, Tolerance(2e-4, 4e-3))


@IMPLEMENTATIONS
def test_rows_of_nothing(implementation, device):
    """Rows of q and k with norm 0 give no NaN in outputs or gradients."""
    inputs = not_normalized(torch.float32, tokens=40)
    for name, token in (("q", 3), ("k", 5)):
        inputs[name][:, token] = 0
    compare(inputs, implementation, device)


def test_growth_is_said_once(caplog):
    log._said.clear()
    inputs = qkv()
    inputs["g"] = -inputs["g"]
    with caplog.at_level(logging.WARNING, "npu_ops"):
        delta_rule(**inputs)
        delta_rule(**inputs)
    (record,) = caplog.records
    assert record.message.startswith("chunk_gated_delta_rule: g has values above 0")
    compare(inputs, "cpu", "cpu")


# Properties of the rule


@IMPLEMENTATIONS
def test_state_layouts_are_transposes(implementation, device):
    inputs = on_device(qkv(1, 21), device)
    turned = inputs["initial_state"].transpose(-1, -2).contiguous()
    one = run(implementation, inputs)
    two = run(implementation, inputs | {"initial_state": turned, "state_v_first": True})
    assert_close("o", two["output 0"], one["output 0"], Tolerance(1e-6, 1e-6))
    assert_close("state", two["output 1"].transpose(-1, -2), one["output 1"], FP32)


@IMPLEMENTATIONS
def test_ways_to_say_the_same(implementation, device):
    inputs = on_device(qkv(), device)
    same = [
        {name: inputs[name].repeat_interleave(2, 2) for name in ("q", "k")},
        {"scale": 16**-0.5},
        {"cu_seqlens": torch.tensor([0, 40], device=device)},
    ]
    with forced(implementation, OP):
        expected = delta_rule(**inputs)
        for changes in same:
            for a, e in zip(delta_rule(**inputs | changes), expected, strict=True):
                assert_close(str(list(changes)), a, e, Tolerance(1e-6, 1e-6))


def test_flas_metadata_changes_nothing():
    inputs = qkv() | {"cu_seqlens": torch.tensor([0, 40])}
    given = {"cu_seqlens_cpu": torch.tensor([0, 40]), "chunk_indices": torch.tensor([[0, 0]])}
    for a, e in zip(delta_rule(**inputs | given), delta_rule(**inputs), strict=True):
        assert torch.equal(a, e)


def test_gates_and_betas_of_other_dtypes():
    """g and beta are converted to fp32, and their gradients have the inputs' dtypes."""
    inputs = qkv(dtype=torch.bfloat16)
    inputs |= {name: inputs[name].half() for name in ("g", "beta")}
    actual = evaluate(delta_rule, inputs, ("g", "beta"))
    assert actual["gradient of g"].dtype == actual["gradient of beta"].dtype == torch.float16
    wide = evaluate(delta_rule, inputs | {n: inputs[n].float() for n in ("g", "beta")}, ("g",))
    assert torch.equal(actual["output 0"], wide["output 0"])


@IMPLEMENTATIONS
def test_a_head_more_than_cores(implementation, device, monkeypatch):
    """With 4 heads on 3 cores, three heads run first, then the fourth in two column blocks."""
    monkeypatch.setattr(hardware, "num_cube_cores", lambda device: 3)
    inputs = qkv(1, 130, 2, 4)
    draw = torch.Generator().manual_seed(1)
    inputs["v"] = torch.randn(1, 130, 4, 64, generator=draw)
    inputs["initial_state"] = torch.randn(1, 4, 16, 64, generator=draw)
    compare(inputs, implementation, device)
