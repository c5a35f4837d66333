"""Test which calls of Megatron's Gated Delta Net npu-ops computes, and which stay as they were."""

import types

import processes
import pytest
import torch
from npu_ops_adapters.megatron import (
    causal_conv1d,
    chunk_gated_delta_rule,
    gdn_gate,
    l2norm,
    rms_norm_gated,
)

import npu_ops


# 0.16.1 has one module, without packing and context parallelism; 0.19.2 a package with both.
@pytest.mark.parametrize(
    "version, cases",
    [("0.16.1", {"plain"}), ("0.19.2", {"plain", "packed", "context", "packed context"})],
)
def test_two_ranks_equal_one(tmp_path, version, cases):
    """Tensor parallelism splits the heads over ranks, context parallelism the tokens."""
    for report in processes.ranks("gdn_ranks.py", tmp_path / "store", 2, version):
        found = {case: errors for case, errors in report["errors"].items() if errors != "refused"}
        assert found.keys() == cases
        for errors in found.values():
            assert len(errors) == 8 and max(errors.values()) < 1e-5, found
        assert report["calls"].keys() == cases & {"plain", "context"}
        for case, calls in report["calls"].items():
            for op in ("chunk_gated_delta_rule", "chunk_gated_delta_rule_backward"):
                assert calls[f"npu_ops.{op}.default"] == {"plain": 2, "context": 4}[case]


def rows(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def theirs(*args, **kwargs):
    return "theirs", args, kwargs


def heads(width=16, queries=2, dtype=torch.float32):
    q, k = rows(1, 5, queries, width), rows(1, 5, queries, width)
    v, g, beta = rows(1, 5, 4, 16), -rows(1, 5, 4).abs(), rows(1, 5, 4).sigmoid()
    return q.to(dtype), k.to(dtype), v.to(dtype), g, beta


@pytest.mark.parametrize(
    "arguments, options",
    [
        (heads(width=512), {}),
        (heads(queries=3), {}),
        (heads(dtype=torch.int32), {}),
        (heads(), {"cp_context": object()}),
        (heads(), {"initial_state": rows(1, 4, 16, 16, dtype=torch.float64)}),
        (heads(), {"chunk_size": 128}),
        ((*heads(), 0.5), {}),
    ],
    ids=["width", "heads", "dtype", "context parallel", "state", "chunk", "positional"],
)
def test_delta_rules_that_are_left_to_fla(arguments, options):
    rule = chunk_gated_delta_rule.replace(theirs)
    assert rule(*arguments, **options) == ("theirs", arguments, options)


def test_megatrons_delta_rule_is_ours():
    q, k, v, g, beta = heads()
    rule = chunk_gated_delta_rule.replace(theirs)
    options = {"initial_state": None, "output_final_state": False, "cu_seqlens": None}
    o, state = rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=False, **options)
    assert state is None and o.equal(npu_ops.chunk_gated_delta_rule(q, k, v, g, beta)[0])


@pytest.mark.parametrize("original", [None, theirs], ids=["without fla", "with fla"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_state_of_half_precision_is_computed_with_in_fp32(original, dtype):
    """Megatron's inference stores states in the parameters' dtype."""
    rule = chunk_gated_delta_rule.replace(original)
    inputs, state = heads(dtype=dtype), rows(1, 4, 16, 16, dtype=dtype).requires_grad_()
    o, last = rule(*inputs, initial_state=state, output_final_state=True)
    expected, expected_last = npu_ops.chunk_gated_delta_rule(
        *inputs, initial_state=state.float(), output_final_state=True
    )
    assert o.equal(expected) and last.equal(expected_last) and last.dtype == torch.float32
    last.sum().backward()
    assert state.grad.dtype == dtype


def test_without_fla_our_errors_say_what_is_wrong():
    with pytest.raises(ValueError, match=r"q: got shape \[1, 5, 2, 512\]"):
        chunk_gated_delta_rule.replace(None)(*heads(width=512))
    with pytest.raises(TypeError, match="x: got"):
        l2norm.replace(None)(torch.arange(4))


def test_what_l2norm_leaves_to_fla():
    x = torch.arange(4)
    assert l2norm.replace(theirs)(x, 1e-5) == ("theirs", (x, 1e-5), {})
    assert l2norm.replace(theirs)(rows(3, 8)).equal(npu_ops.l2norm(rows(3, 8)))


@pytest.mark.parametrize("taps, options", [(9, {}), (4, {"residual": rows(2, 9, 6)})])
def test_convolutions_that_are_left_to_fla(taps, options):
    x, weight = rows(2, 9, 6), rows(6, taps)
    name, args, kwargs = causal_conv1d.replace(theirs)(x, weight, activation="silu", **options)
    assert name == "theirs" and args == (x, weight, None)
    assert kwargs == {"activation": "silu", "cu_seqlens": None} | options


@pytest.mark.parametrize("taps", [4, 5])  # npu-ops, and the layer's fallback without causal-conv1d
@pytest.mark.parametrize("activation", ["silu", None])
def test_channels_before_time(taps, activation):
    x, weight, bias = rows(2, 6, 9), rows(6, taps), rows(6)
    convolve = causal_conv1d._replace_channels_first(None)
    y = convolve(x=x, weight=weight, bias=bias, activation=activation)
    expected = torch.nn.functional.conv1d(x, weight[:, None], bias, padding=taps - 1, groups=6)
    expected = expected[..., :9]
    expected = expected if activation is None else torch.nn.functional.silu(expected)
    torch.testing.assert_close(y, expected)


def test_states_of_the_other_convolution_are_left_to_it():
    x, weight = rows(2, 6, 9), rows(6, 4)
    options = {"seq_idx": torch.zeros(2, 9, dtype=torch.int32)}
    name, args, kwargs = causal_conv1d._replace_channels_first(theirs)(x, weight, **options)
    assert name == "theirs" and kwargs == options | {"activation": None}


def test_gates_in_float64_are_left_to_megatron():
    """Megatron computes float64 gates in float32."""

    def original(self, A_log, dt_bias, alpha, beta):
        return "theirs"

    gate, (A_log, dt_bias, alpha) = gdn_gate.replace(original), (rows(4), rows(4), rows(2, 3, 4))
    assert gate(None, A_log, dt_bias, alpha.double(), alpha) == "theirs"
    g, beta = gate(None, A_log, dt_bias, alpha, alpha)
    assert g.equal(npu_ops.gdn_gate(alpha, A_log, dt_bias)) and beta.shape == alpha.shape


def test_norms_that_are_not_torchs_are_left_to_megatron():
    norm = rms_norm_gated.replace(lambda self, x, gate: "theirs")
    silu, x, gate = torch.nn.functional.silu, rows(2, 5, 3, 8), rows(2, 5, 3, 8)

    class Other(torch.nn.RMSNorm):
        """A subclass may use its weight differently."""

    def layer(out_norm, act_fn=silu):
        return types.SimpleNamespace(out_norm=out_norm, act_fn=act_fn)

    for other in (
        layer(torch.nn.LayerNorm(8)),
        layer(Other(8, eps=1e-5)),
        layer(torch.nn.RMSNorm(8)),  # eps depends on the dtype
        layer(torch.nn.RMSNorm(8, eps=1e-5), torch.nn.functional.gelu),
    ):
        assert norm(other, x, gate) == "theirs"
    ours = layer(torch.nn.RMSNorm(8, eps=1e-5))
    expected = (ours.out_norm(x) * silu(gate)).reshape(-1, 8)
    torch.testing.assert_close(norm(ours, x, gate), expected)
