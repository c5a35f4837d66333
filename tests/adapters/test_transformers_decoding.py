"""transformers' models decode with npu-ops: the same tokens and logits in every step."""

from __future__ import annotations

import npu_ops_adapters
import pytest
import torch
import transformers_models
from transformers import DynamicCache

from npu_ops.core import env
from npu_ops.core.compare import Tolerance, assert_close


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
@pytest.mark.parametrize("padded", [False, True])
def test_generation_with_a_cache(name, padded):
    """Prefill and decoding give transformers' tokens and logits."""
    calls = transformers_models.compare_generation(name, padded)
    assert calls["causal_conv1d_update"] == calls["gated_delta_rule_update"] == 5
    assert calls["chunk_gated_delta_rule"] == 1


def test_a_step_that_is_not_ours_is_theirs(applied):
    """With gradients, NPU_OPS_CONSISTENT or fp16 states, gated_delta_rule_update does not run."""
    model, inputs = transformers_models.built("qwen3_next")
    ids = inputs["input_ids"][:, :9]

    def step(change=lambda cache: None):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids, past_key_values=cache)
        change(cache)
        with transformers_models.Counter() as counter:
            model(ids[:, :1], past_key_values=cache)
        return transformers_models.by_op(counter.calls)

    def halve(cache):
        states = next(layer for layer in cache.layers if hasattr(layer, "recurrent_states"))
        states.recurrent_states[0] = states.recurrent_states[0].half()

    assert "gated_delta_rule_update" not in step()
    with torch.no_grad():
        assert step()["gated_delta_rule_update"] == 1
        assert step(halve)["fused_recurrent_gated_delta_rule"] == 1
        with env.override(consistent="tokens"):
            assert step()["chunk_gated_delta_rule"] == 1


def test_decoding_goes_on_where_transformers_left_off():
    """Our steps and theirs alternate; both caches keep a token more than the convolution needs."""
    model, inputs = transformers_models.built("qwen3_next")
    ids = inputs["input_ids"][:, :30]
    with torch.no_grad():
        npu_ops_adapters.revert()
        whole = model(ids).logits
        cache = DynamicCache(config=model.config)
        parts = [model(ids[:, :20], past_key_values=cache).logits]
        for n in range(20, 30):
            npu_ops_adapters.apply() if n % 2 else npu_ops_adapters.revert()
            parts.append(model(ids[:, n : n + 1], past_key_values=cache).logits)
    npu_ops_adapters.revert()
    assert_close("logits", torch.cat(parts, 1), whole, Tolerance(1e-4, 1e-4))
