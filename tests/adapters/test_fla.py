"""Test npu-ops as a backend of a stand-in for fla: calls it takes, calls it leaves to fla, and
reverting."""

from __future__ import annotations

import functools
import importlib
import sys
import types

import fla_double
import npu_ops_adapters
import npu_ops_import_hook
import pytest
import torch
from npu_ops_adapters.fla import functions

import npu_ops
from npu_ops.core import env, log


def rows(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def heads(width=16, queries=2, length=5):
    q, k = rows(1, length, queries, width), rows(1, length, queries, width)
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    v, g = rows(1, length, 4, 16), -rows(1, length, 4).abs()
    return q, k, v, g, rows(1, length, 4).sigmoid()


@pytest.fixture(params=fla_double.FORMS)
def form(request, tmp_path, monkeypatch):
    """Write the stand-in in one form, not imported yet; return the form. The test's
    end removes it."""
    fla_double.write(tmp_path, request.param)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(log, "_said", set())
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    yield request.param
    npu_ops_adapters.revert()
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        del sys.modules[name]


@pytest.fixture
def layers(form):
    """Import fla's layers after npu-ops was applied."""
    npu_ops_adapters.apply()
    return importlib.import_module("fla.layers")


def fla_rows(status):
    return {row.target: row.sentence for row in status if row.target.startswith("fla.")}


def registry(form):
    """Return the registry of the delta rule, as it is after the first call."""
    home = importlib.import_module(fla_double.REGISTRY[form])
    return home.BackendRegistry._registries["gated_delta_rule"]


# Patches: applied, reported and reverted


def test_every_patch_is_applied_verified_and_undone(layers, form):
    arguments = heads()
    waiting = [name for name, state in fla_rows(npu_ops_adapters.plan()).items() if "yet" in state]
    at_first_call = "fla.ops.gated_delta_rule.backends:gdr_registry._backends.npu_ops"
    assert waiting == ([at_first_call] if form == "main" else [])
    o, state = layers.chunk_gdn(*arguments)
    expected = npu_ops.chunk_gated_delta_rule(*arguments)[0]
    assert state is None and o.equal(expected)
    assert set(fla_rows(npu_ops_adapters.plan()).values()) == {"applied"}
    verified = fla_rows(npu_ops_adapters.verify())
    assert set(verified.values()) == {"applied"} and len(verified) == 11
    assert set(fla_rows(npu_ops_adapters.revert()).values()) == {"reverted"}
    assert layers.chunk_gated_delta_rule(*arguments) == ("theirs", "chunk_gated_delta_rule")
    assert list(registry(form)._backends) == ["triton_ascend"]
    for name, module in fla_double.MODULES[form].items():
        assert getattr(layers, name) is getattr(sys.modules[module], name)
        assert getattr(layers, name).__name__ == name


def test_fla_imported_first(form):
    """Names that layers imported by value are replaced too."""
    npu_ops_import_hook.unwatch()
    layers = importlib.import_module("fla.layers")
    assert layers.l2norm(rows(3, 4)) == ("theirs", "l2norm")
    npu_ops_adapters.apply()
    assert layers.l2norm(rows(3, 4)).equal(npu_ops.l2norm(rows(3, 4)))
    assert isinstance(layers.chunk_gated_delta_rule(*heads())[0], torch.Tensor)


def test_ours_is_asked_before_flas_own(layers, form):
    layers.chunk_gated_delta_rule(*heads())
    own = registry(form)._backends["triton_ascend"]
    own.is_available = lambda: True
    assert isinstance(layers.chunk_gated_delta_rule(*heads())[0], torch.Tensor)
    left = layers.chunk_gated_delta_rule(*heads(queries=3))
    assert left == ("triton_ascend", "chunk_gated_delta_rule")


@pytest.mark.parametrize("op", ["chunk_gated_delta_rule", "l2norm", "all"])
def test_a_disabled_op_stays_flas(form, op):
    with env.override(disable=frozenset({op})):
        npu_ops_adapters.apply()
        layers = importlib.import_module("fla.layers")
        chunk, norm = layers.chunk_gated_delta_rule(*heads()), layers.l2norm(rows(3, 4))
    assert (chunk[0] == "theirs") == (op != "l2norm")
    assert isinstance(norm, tuple) == (op != "chunk_gated_delta_rule")


def test_without_flas_dispatch_the_registry_is_refused_with_a_sentence(form, monkeypatch):
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "1")
    npu_ops_adapters.apply()
    layers = importlib.import_module("fla.layers")
    importlib.import_module("fla.ops.gated_delta_rule.backends")
    assert layers.chunk_gated_delta_rule(*heads()) == ("theirs", "chunk_gated_delta_rule")
    states = fla_rows(npu_ops_adapters.apply())
    (refused,) = [state for state in states.values() if state != "applied"]
    assert refused.startswith("refused") and refused.endswith("fla calls no backend")


def test_an_overwritten_backend_is_seen(layers, form):
    layers.chunk_gated_delta_rule(*heads())
    registry(form)._backends["npu_ops"] = None
    states = fla_rows(npu_ops_adapters.verify()).values()
    assert [state for state in states if state != "applied"] == ["overwritten by builtins.NoneType"]
    del registry(form)._backends["npu_ops"]
    npu_ops_adapters.revert()
    assert list(registry(form)._backends) == ["triton_ascend"]


def test_a_registry_of_another_form_is_refused(layers, form):
    """fla can still be imported, and runs its own kernels."""
    importlib.import_module("fla.ops.gated_delta_rule.backends")
    npu_ops_adapters.revert()
    table = registry(form)
    table.renamed = table.__dict__.pop("_backends")
    table._get_sorted_backends = lambda: list(table.renamed.values())
    states = fla_rows(npu_ops_adapters.apply())
    assert any("has no _backends; it was there in fla 0.5.2" in s for s in states.values())
    assert layers.chunk_gated_delta_rule(*heads()) == ("theirs", "chunk_gated_delta_rule")


def test_an_adapter_that_fails_leaves_fla_importable(form, monkeypatch):
    monkeypatch.setattr(functions, "replaced", None)
    npu_ops_import_hook.watch(npu_ops_adapters.imported)
    layers = importlib.import_module("fla.layers")
    assert layers.l2norm(rows(3, 4)) == ("theirs", "l2norm")


# The delta rule by chunks


@pytest.mark.parametrize(
    "arguments, options, why",
    [
        (heads(width=512), {}, "q: got shape"),
        (heads(queries=3), {}, "v: got shape"),
        (tuple(x.to("meta") for x in heads()), {}, "got device meta"),
        (heads(), {"cp_context": object()}, "cp_context: got None for group"),
        (heads(), {"cp_context": types.SimpleNamespace(layout="zigzag")}, "got layout 'zigzag'"),
        (heads(), {"initial_state": rows(1, 4, 16, 16).double()}, "initial_state: got"),
        (heads(), {"initial_state": rows(2, 4, 16, 16)}, "initial_state: got shape"),
        (heads(), {"chunk_size": 128}, "chunk_size"),
        (heads(), {"cu_seqlens": torch.tensor([0, 40])}, "cu_seqlens"),
        (heads(), {"a_new_option": 1}, "unexpected keyword"),
        ((*heads()[:3], None, heads()[4]), {}, "g: got NoneType"),
        ((*heads(), *[None] * 8, None), {}, "positional"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_delta_rules_that_are_left_to_fla(layers, form, arguments, options, why):
    assert layers.chunk_gated_delta_rule(*arguments, **options)[0] == "theirs"
    (logged,) = registry(form)._logged
    assert why in logged


@pytest.mark.parametrize("mode", ["tokens", "chunks"])
def test_no_delta_rule_is_left_to_fla_where_a_server_has_to_agree(layers, mode):
    says = r"^NPU_OPS_CONSISTENT is set, but npu-ops does not support a call of \w+: .*other"
    q, k, v, g, _ = heads()
    with env.override(consistent=mode):
        with pytest.raises(RuntimeError, match=says):
            layers.chunk_gated_delta_rule(*heads(), other=1)
        with pytest.raises(RuntimeError, match=says):
            layers.fused_recurrent_gated_delta_rule(q, k, v, g, other=1)
        assert layers.l2norm(rows(3, 4).long()) == ("theirs", "l2norm")


def test_what_fla_takes_and_we_name_otherwise(layers):
    q, k, v, g, beta = arguments = heads()
    half = rows(1, 4, 16, 16, dtype=torch.float16).requires_grad_()
    unused = {"A_log": rows(4), "dt_bias": rows(4), "cu_seqlens_cpu": None, "chunk_indices": None}
    o, state = layers.chunk_gated_delta_rule(
        *arguments, initial_state=half, output_final_state=True, **unused
    )
    expected = npu_ops.chunk_gated_delta_rule(
        *arguments, initial_state=half.float(), output_final_state=True
    )
    assert o.equal(expected[0]) and state.equal(expected[1]) and state.dtype == torch.float32
    o.sum().backward()
    assert half.grad.dtype == torch.float16
    turned = functools.partial(
        layers.chunk_gated_delta_rule,
        *arguments,
        initial_state=half.mT.contiguous(),
        output_final_state=True,
    )
    torch.testing.assert_close(turned(state_v_first=True)[1].mT, state)
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        torch.testing.assert_close(turned(transpose_state_layout=True)[1].mT, state)
    assert turned(transpose_state_layout=True, state_v_first=True)[0] == "theirs"


def test_everything_in_the_kernel(layers):
    q, k, v, a, b = heads(length=70)
    options = {
        "scale": 0.3, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True, "cu_seqlens": torch.tensor([0, 30, 70]),
        "use_gate_in_kernel": True, "A_log": rows(4), "dt_bias": rows(4), "chunk_size": 32,
        "output_final_state": True,
    }  # fmt: skip
    o, state = layers.chunk_gated_delta_rule(q, k, v, a, b, **options)
    expected = npu_ops.chunk_gated_delta_rule(q, k, v, a, b, **options)
    assert o.equal(expected[0]) and state.equal(expected[1])


# Other functions


def test_the_recurrent_rule(layers):
    q, k, v, g, beta = heads()
    o, state = layers.fused_recurrent_gated_delta_rule(
        q, k, v.half(), g=g, beta=beta, initial_state=rows(1, 4, 16, 16).bfloat16(),
        output_final_state=True, A_log=rows(4),
    )  # fmt: skip
    expected = npu_ops.fused_recurrent_gated_delta_rule(
        q, k, v.half().float(), g, beta=beta,
        initial_state=rows(1, 4, 16, 16).bfloat16().float(), output_final_state=True,
    )  # fmt: skip
    assert o.dtype == torch.float16 and o.equal(expected[0].half())
    assert state.equal(expected[1])
    name = "fused_recurrent_gated_delta_rule"
    assert layers.fused_recurrent_gated_delta_rule(q, k, v, g, other=1) == ("theirs", name)
    assert layers.fused_recurrent_gated_delta_rule(q, k[..., :4], v, g) == ("theirs", name)


def test_kimi_delta_attention(layers):
    """`chunk_kda` and `fused_recurrent_kda`, with A_log `[1, 1, H, 1]` as Kimi Linear has it."""
    q, k, v, g, beta = heads(queries=4)
    g = g[..., None] * torch.rand(16)
    flags = {
        "use_gate_in_kernel": True, "A_log": torch.randn(1, 1, 4, 1), "dt_bias": torch.randn(64),
        "lower_bound": -5.0, "use_qk_l2norm_in_kernel": True, "output_final_state": True,
    }  # fmt: skip
    plain = flags | {"A_log": flags["A_log"].flatten()}
    by_chunks = npu_ops.chunk_kda(q, k, v, g, beta, **plain)
    by_token = npu_ops.chunk_kda(q, k, v, g, beta, chunk_size=1, **plain)
    more = {"safe_gate": True, "disable_recompute": True, "cu_seqlens_cpu": torch.tensor([0, 5])}
    found = layers.chunk_kda(q, k, v, g, beta, **flags, **more)
    recurrent = layers.fused_recurrent_kda(q, k, v, g, beta, **flags)
    for one, other in zip((*found, *recurrent), (*by_chunks, *by_token), strict=True):
        assert one.equal(other)
    values = layers.chunk_kda(q, k, v, g, beta, state_v_first=True, output_final_state=True)[1]
    assert values.shape == (1, 4, 16, 16)
    for left in ({"return_intermediate_states": True}, {"cp_context": object()}, {"unknown": 1}):
        assert layers.chunk_kda(q, k, v, g, beta, **left) == ("theirs", "chunk_kda")
    with env.override(consistent="tokens"), pytest.raises(RuntimeError, match="call of chunk_kda"):
        layers.chunk_kda(q, k, v, g, beta, cp_context=object())


def test_l2norm_and_the_gate(layers):
    x = rows(2, 5, 4)
    assert layers.l2norm(x, eps=1e-3).equal(npu_ops.l2norm(x, 1e-3))
    assert layers.l2norm(x.long()) == ("theirs", "l2norm")
    g = layers.fused_gdn_gate(x, rows(4), output_dtype=torch.float32)
    assert g.equal(npu_ops.gdn_gate(x, rows(4)))
    assert layers.fused_gdn_gate(x, rows(4), output_dtype=torch.bfloat16)[0] == "theirs"
    assert layers.fused_gdn_gate(x, rows(1, 1, 4))[0] == "theirs"


def test_the_convolution(layers):
    x, weight = rows(2, 9, 6), rows(6, 4)
    options = {"activation": "swish", "output_final_state": True, "residual": rows(2, 9, 6)}
    y, state = layers.causal_conv1d(x, weight, cu_seqlens_cpu=None, seq_idx=None, **options)
    expected = npu_ops.causal_conv1d(x, weight, **options)
    assert y.equal(expected[0]) and state.equal(expected[1])
    folded = layers.causal_conv1d(x.unflatten(2, (2, 3)), weight)[0]
    assert folded.flatten(2).equal(npu_ops.causal_conv1d(x, weight)[0])
    for left in (
        {"backend": "cuda"},
        {"cp_context": object()},
        {"activation": "relu"},
        {"seq_idx": torch.zeros(2, 9)},
        {"initial_state": rows(2, 6, 3)},
    ):
        assert layers.causal_conv1d(x, weight, **left) == ("theirs", "causal_conv1d")
    assert layers.causal_conv1d(x, rows(6, 9)) == ("theirs", "causal_conv1d")


@pytest.mark.parametrize("shape", [(3, 6), (1, 3, 6), (3, 1, 6)])
def test_the_convolutions_step(layers, shape):
    """fla's cache moves by one token; its last column is the new token."""
    past, x, weight = rows(3, 6, 4), rows(*shape), rows(6, 4).requires_grad_()
    cache = past.clone()
    y, same = layers.causal_conv1d_update(x, cache, weight=weight, activation="silu")
    expected = torch.cat([past[..., 1:], x.reshape(3, 6, 1)], -1)
    assert same is cache and cache.equal(expected) and y.shape == x.shape
    torch.testing.assert_close(
        y.reshape(3, 6), torch.nn.functional.silu((expected * weight.detach()).sum(-1))
    )
    again, same = layers.causal_conv1d_update(x, past, residual=x, weight=weight, activation="silu")
    assert same is past and past.equal(expected)
    torch.testing.assert_close(again, y + x)
    left = layers.causal_conv1d_update(x, cache[..., 1:], weight=weight)
    assert left == ("theirs", "causal_conv1d_update") and cache.equal(expected)


def test_the_gated_norm(layers):
    x, gate, weight = rows(2, 5, 8), rows(2, 5, 8), rows(8)
    y = layers.rms_norm_gated(x, gate, weight, None, residual_in_fp32=True)
    assert y.equal(npu_ops.rms_norm_gated(x, weight, gate))
    for left in ({"residual": x}, {"prenorm": True}, {"activation": "relu"}):
        assert layers.rms_norm_gated(x, gate, weight, None, **left) == ("theirs", "rms_norm_gated")
    assert layers.rms_norm_gated(x, gate, None, None)[0] == "theirs"
    y = layers.rmsnorm_fn(x, weight, None, gate, group_size=4, norm_before_gate=False)
    expected = npu_ops.rms_norm_gated(x, weight, gate, group_size=4, norm_before_gate=False)
    assert y.equal(expected)
    assert layers.rmsnorm_fn(x, weight, None) == ("theirs", "rmsnorm_fn")


def test_other_signatures_are_refused(form, monkeypatch):
    module = types.ModuleType(fla_double.MODULES[form]["l2norm"])
    module.l2norm = lambda x, eps: None
    monkeypatch.setitem(sys.modules, module.__name__, module)
    states = fla_rows(npu_ops_adapters.apply())
    assert "expected (x, eps, output_dtype)" in states[f"{module.__name__}:l2norm"]
