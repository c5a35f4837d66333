"""The recurrent gated delta rule against the reference, other formulas and its own properties."""

import pytest
import torch
from delta_rule_calls import qkv
from support import (
    assert_all_close,
    every_implementation,
    floats,
    forced,
    on_device,
    runner,
)

import npu_ops
from npu_ops.core import env
from npu_ops.core.compare import Tolerance, assert_close
from npu_ops.ops.fused_recurrent_gated_delta_rule import op
from npu_ops.ops.fused_recurrent_gated_delta_rule.cases import CASES, DIFFERENTIABLE, TOLERANCES

OP = "fused_recurrent_gated_delta_rule"
FP32 = TOLERANCES[torch.float32]
IMPLEMENTATIONS = every_implementation(op.forward)
delta_rule = npu_ops.fused_recurrent_gated_delta_rule
run = runner(delta_rule, OP, DIFFERENTIABLE)


def compare(inputs, implementation, device, tolerances=TOLERANCES):
    """Run an implementation, compare it with the reference in fp64, return its results."""
    expected = run("reference", floats(inputs, torch.float64))
    actual = run(implementation, on_device(inputs, device))
    assert_all_close(actual, expected, tolerances)
    return actual


# Results, compared with the reference


def by_matrices(q, k, v, g, beta, initial_state, scale):
    """Compute one head as in the paper: S = alpha (I - beta k k^T) S + beta k v^T, in fp64."""
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


# Inputs that are hard to compute with


@IMPLEMENTATIONS
@pytest.mark.parametrize("gate", [0.0, -1e-4, -1.0])
def test_correlated_keys(gate, implementation, device):
    """With positive keys each token overwrites much of what earlier tokens wrote."""
    tokens = 256 if device == "cpu" and implementation == "cpu" else 40
    inputs = qkv(1, tokens, 1, 1, 32, 32)
    for name in ("q", "k"):
        inputs[name] = torch.nn.functional.normalize(torch.rand(inputs[name].shape), dim=-1)
    inputs["g"] = torch.full_like(inputs["g"], gate)
    compare(inputs, implementation, device)


@IMPLEMENTATIONS
def test_large_values_in_bf16(implementation, device):
    """The state is fp32, so it holds values that fp16 cannot."""
    inputs = qkv(1, 9, dtype=torch.bfloat16)
    inputs["v"] = inputs["v"] * 1e30
    with forced(implementation, OP):
        o, final = delta_rule(**on_device(inputs, device))
    assert final.dtype == torch.float32 and o.isfinite().all() and final.abs().max() > 1e29


# Properties of the rule


@IMPLEMENTATIONS
def test_a_memory_returns_what_was_written(implementation, device):
    """With orthonormal keys, beta 1 and no decay, the query q = k_i reads v_i."""
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
def test_state_layouts_are_transposes(implementation, device):
    """Also for K equal to V, where shapes do not reveal a transposed state."""
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
    """One gate or beta per head equals the same value for each key or value channel."""
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


# As a torch operator


def operator_inputs(packed=True):
    """Return the operator's positional arguments, for six tokens.

    packed: two sequences. Otherwise one sequence with every kind of gate.
    """
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


def test_strict_mode_runs_kernels():
    with env.override(strict=True):
        delta_rule(**qkv(dtype=torch.float16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_tokens_with_every_decay(dtype):
    """A sequence without tokens passes its state on."""
    q, v = torch.ones(1, 0, 1, 4, dtype=dtype), torch.ones(1, 0, 2, 3, dtype=dtype)
    gates = {"gk": torch.ones(1, 0, 2, 4, dtype=dtype), "gv": torch.ones_like(v)}
    state = torch.randn(1, 2, 4, 3, dtype=dtype)
    o, final = npu_ops.fused_recurrent_gated_delta_rule(
        q, q, v, **gates, initial_state=state, output_final_state=True,
        cu_seqlens=torch.tensor([0, 0]),
    )  # fmt: skip
    assert o.shape == v.shape and torch.equal(final, state)
