"""Test transformers' models that npu-ops recognises by their code: their results stay the same.

None of our lists has their names. A function that a model changes is left to that model.
"""

from __future__ import annotations

import importlib
import pathlib
import sys

import npu_ops_adapters
import pytest
import torch
import transformers
import transformers_models
from transformers.models.glm5_next import modeling_glm5_next as glm5_next
from transformers.models.inkling2 import modeling_inkling2 as inkling2
from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear
from transformers.models.olmo_hybrid import modeling_olmo_hybrid as olmo_hybrid
from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen4_exp

from npu_ops.core import env
from npu_ops.core.compare import Tolerance, assert_close

# Calls of one linear attention layer with its norms, and of one attention layer.
RULE = {"causal_conv1d": 1, "chunk_gated_delta_rule": 1, "rms_norm_gated": 1}
CHANNELS = {"causal_conv1d": 1, "chunk_kda": 1, "rms_norm_gated": 1}
CALLS = {
    "qwen4_exp": RULE | {"rms_norm": 59, "rope": 2, "swiglu": 4},  # includes its indexer's
    "qwen4_exp_silu": RULE | {"rms_norm": 65, "rope": 2, "swiglu": 4},
    "qwen4_exp_images": RULE | {"rms_norm": 91, "rope": 4, "swiglu": 4},
    "olmo_hybrid": RULE | {"rms_norm": 7, "rope": 1, "swiglu": 2},
    "kimi_linear": CHANNELS | {"rms_norm": 6, "swiglu": 3},
    "bailing_hybrid": CHANNELS | {"rms_norm": 6, "swiglu": 3},
    "glm5_next": CHANNELS | {"rms_norm": 16, "rope": 2},
}
# all images are one call
ATTENTION = dict.fromkeys(CALLS, 1) | {"qwen4_exp_images": 3, "glm5_next": 3}


@pytest.mark.parametrize("attention", [None, "npu_ops"])
@pytest.mark.parametrize("name", transformers_models.BY_DEFINITION)
def test_same_logits_and_gradients(name, attention):
    calls = transformers_models.compare(name, attention)
    assert calls == CALLS[name] | ({"attention": ATTENTION[name]} if attention else {})


STEPS = {
    "qwen4_exp_silu": "gated_delta_rule_update",
    "qwen4_exp_images": "gated_delta_rule_update",
    "olmo_hybrid": "gated_delta_rule_update",
    "kimi_linear": "fused_recurrent_gated_delta_rule",
    "bailing_hybrid": "fused_recurrent_gated_delta_rule",
    "glm5_next": "fused_recurrent_gated_delta_rule",
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_generation_with_a_cache(name, padded):
    """Each step calls our convolution and rule, also with decay per key channel or beta up to 2."""
    calls = transformers_models.compare_generation(name, padded)
    assert calls["causal_conv1d_update"] == calls[STEPS[name]] == 5
    assert calls["causal_conv1d"] == 1
    assert calls.get("gdn_gate", 0) == (5 if name == "olmo_hybrid" else 0)


@pytest.mark.parametrize("name", ["qwen4_exp", "olmo_hybrid"])
def test_packed_sequences(name, applied):
    """Packed sequences do not see each other. Without other packages, transformers refuses them."""
    transformers_models.compare_packed(name)


# A model that is newer than npu-ops


def next_model(folder, monkeypatch, *changes: tuple[str, str]):
    """Import a model unknown to all our releases: OLMo Hybrid's with some changes."""
    package = folder / "next_model"
    package.mkdir()
    (package / "__init__.py").touch()
    for kind in ("modeling", "configuration"):
        source = importlib.import_module(f"transformers.models.olmo_hybrid.{kind}_olmo_hybrid")
        text = pathlib.Path(source.__file__).read_text("utf-8")
        text = text.replace("OlmoHybrid", "NextModel").replace("olmo_hybrid", "next_model")
        for old, new in changes if kind == "modeling" else ():
            assert old in text
            text = text.replace(old, new)
        (package / f"{kind}_next_model.py").write_text(text, "utf-8")
    monkeypatch.setattr(
        transformers.models, "__path__", [*transformers.models.__path__, str(folder)]
    )
    return importlib.import_module("transformers.models.next_model.modeling_next_model")


@pytest.fixture
def next_one(tmp_path, monkeypatch, applied):
    """Yield a function that imports the changed model, which is removed after the test."""
    yield lambda *changes: next_model(tmp_path, monkeypatch, *changes)
    npu_ops_adapters.revert()
    for name in [n for n in sys.modules if n.startswith("transformers.models.next_model")]:
        del sys.modules[name]


def states(module) -> dict:
    """Return the state of each patch of a module, by the name it replaces."""
    rows = [row for row in npu_ops_adapters.plan() if row.target.startswith(f"{module.__name__}:")]
    return {row.target.partition(":")[2]: row.sentence for row in rows}


PATCHED = {
    "causal_conv1d_fn", "causal_conv1d_update", "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule", "NextModelGatedDeltaNet.forward",
    "NextModelRMSNorm.forward", "NextModelRMSNormGated.forward", "apply_rotary_pos_emb",
    "NextModelMLP.forward",
}  # fmt: skip


def test_the_next_model_needs_no_release_of_ours(next_one):
    module = next_one()
    assert states(module) == dict.fromkeys(PATCHED, "applied")


# Changes to a formula, with the functions that are then left to the model.
FORMULAS = {
    "a filter that sees the future": (
        "padding = weight.shape[-1] - 1", "padding = weight.shape[-1] - 2; seq_len -= 1",
        {"causal_conv1d_fn"},
    ),
    "a step that forgets nothing": (
        "conv_state.copy_(hidden_states_new[:, :, -state_len:])", "pass",
        {"causal_conv1d_update", "NextModelGatedDeltaNet.forward"},
    ),
    "a convolution in bf16": (
        "return out.to(hidden_states.dtype)", "return out.bfloat16()",
        {"causal_conv1d_fn", "causal_conv1d_update", "NextModelGatedDeltaNet.forward"},
    ),
    "no epsilon": (
        "torch.rsqrt(variance + self.variance_epsilon)", "torch.rsqrt(variance)",
        {"NextModelRMSNorm.forward", "NextModelRMSNormGated.forward"},
    ),
    "another gate": (
        "ACT2FN[self.activation](gate.to(torch.float32))", "torch.tanh(gate.to(torch.float32))",
        {"NextModelRMSNormGated.forward"},
    ),
    "up before it is opened": (
        "self.act_fn(self.gate_proj(x)) * self.up_proj(x)",
        "self.gate_proj(x) * self.act_fn(self.up_proj(x))", {"NextModelMLP.forward"},
    ),
    "rotated pairs": (
        "x1 = x[..., : x.shape[-1] // 2]", "x1 = x[..., ::2]", {"apply_rotary_pos_emb"},
    ),
    "another scale": (
        "query = query / (query.shape[-1] ** 0.5)", "query = query / query.shape[-1]",
        {"torch_recurrent_gated_delta_rule", "NextModelGatedDeltaNet.forward"},
    ),
    "another scale of chunks": (
        "scaling = query.shape[-1] ** -0.5", "scaling = 1.0", {"torch_chunk_gated_delta_rule"},
    ),
    "another epsilon of the norm of q and k": (
        "sum(dim=dim, keepdim=True) + eps)", "sum(dim=dim, keepdim=True) + 2 * eps)",
        {"torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule",
         "NextModelGatedDeltaNet.forward"},
    ),
    "beta up to 1.5": (
        "beta = beta * 2.0", "beta = beta * 1.5", {"NextModelGatedDeltaNet.forward"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("old, new, left", FORMULAS.values(), ids=FORMULAS)
def test_another_formula_is_left_to_the_model(old, new, left, next_one, caplog):
    module = next_one((old, new))
    found = states(module)
    refused = {name for name, state in found.items() if state != "applied"}
    assert refused == left and found.keys() == PATCHED
    sentence = "kept: a small call gives another result than npu-ops: "
    assert all(found[name].startswith(sentence) for name in left)
    assert all(f"{module.__name__}:{name}: {sentence}" in caplog.text for name in left)


def test_a_setting_that_was_not_compared_is_left_to_the_model(next_one):
    """A module with other attributes than the one that was compared runs its own function."""
    module = next_one(
        ("self.variance_epsilon = eps", "self.variance_epsilon, self.factor = eps, 1"),
        ("return (self.weight *", "return self.factor * (self.weight *"),
    )
    x = torch.randn(3, 8)
    once, twice = module.NextModelRMSNorm(8), module.NextModelRMSNorm(8)
    twice.factor = 2
    with transformers_models.Counter() as counter:
        assert torch.equal(twice(x), 2 * type(twice).forward.__wrapped__(once, x))
        assert counter.calls == {}
        once(x)
    assert transformers_models.by_op(counter.calls) == {"rms_norm": 1}


def test_importing_a_model_draws_nothing(next_one):
    """The program's random state, switches and defaults are as without npu-ops."""
    torch.manual_seed(5)
    before, defaults = torch.get_rng_state(), torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"), env.override(impl={"rope": "triton_ascend"}, strict=True):
            settings = env.settings
            module = next_one()
            assert env.settings is settings
    finally:
        torch.set_default_dtype(defaults)
    assert torch.equal(torch.get_rng_state(), before)
    assert states(module) == dict.fromkeys(PATCHED, "applied")


# Calls that are left to the models


def test_a_gate_that_is_no_setting_of_ours_is_the_models(applied):
    norm = qwen4_exp.Qwen4ExpTextRMSNormGated(8, activation="gelu")
    x = torch.randn(3, 8)
    with transformers_models.Counter() as counter:
        assert torch.equal(norm(x, x), type(norm).forward.__wrapped__(norm, x, x))
    assert counter.calls == {}


def test_a_vision_tower_with_another_rotation_is_refused(applied):
    assert "small call" in states(inkling2)["apply_rotary_pos_emb_vision"]
    assert inkling2.apply_rotary_pos_emb_vision.__module__ == inkling2.__name__


def test_a_norm_without_a_weight_is_kept_with_its_reason(applied):
    state = states(glm5_next)["Glm5NextTextUnweightedRMSNorm.forward"]
    assert state.endswith("ValueError: weight: got None, needs a weight for each element")


def test_a_step_by_channel_has_the_bits_of_training(applied):
    """With NPU_OPS_CONSISTENT a prompt of 69 tokens and a decoded one have the bits of 70."""
    x, g = torch.randn(1, 70, 2, 8), -torch.rand(1, 70, 2, 8)
    tokens = x, x, x, g, g[..., 0].exp()
    with env.override(consistent="tokens"):
        whole, _ = kimi_linear.chunk_kimi_delta_attention(*tokens, use_qk_l2norm_in_kernel=True)
        first, state = kimi_linear.chunk_kimi_delta_attention(
            *(t[:, :69] for t in tokens), 64, None, True, True
        )
        last, _ = kimi_linear.recurrent_kimi_delta_attention(
            *(t[:, 69:] for t in tokens), state, True, True
        )
    assert torch.equal(torch.cat([first, last], 1), whole)


def test_heads_under_autocast_keep_their_dtype(applied):
    """OLMo Hybrid's rope returns bf16; Qwen's returns the tables' fp32."""
    q, cos = torch.randn(1, 2, 5, 8).bfloat16(), torch.randn(1, 5, 8)
    original = olmo_hybrid.apply_rotary_pos_emb.__wrapped__
    for a, e in zip(
        olmo_hybrid.apply_rotary_pos_emb(q, q, cos, cos), original(q, q, cos, cos), strict=True
    ):
        assert a.dtype == e.dtype == torch.bfloat16
        assert_close("rope", a, e, Tolerance(1e-2, 2e-2))
