"""Check that results are the same with npu-ops and, after `revert`, without."""

from __future__ import annotations

import inspect
import sys
import types

from megatron_checks.release import (
    BDA,
    CALLS,
    TARGETS,
    calls_of,
    check,
    gdn,
    gdn_targets,
    held,
    snapshot,
    states,
    targets,
)
from megatron_checks.results import RESULTS, compare, compute


@check("early")
def other_code_over_ours_is_reported():
    import npu_ops_adapters

    module, name = sys.modules[BDA], "bias_dropout_add_unfused"
    ours, original = getattr(module, name), inspect.unwrap(getattr(module, name))
    importer = types.ModuleType("by_value")
    sys.modules["by_value"] = importer
    try:
        importer.kept = original
        module.bias_dropout_add_unfused = lambda training: None
        importer.kept_train = inspect.unwrap(module.bias_dropout_add_fused_train)
        found = states(npu_ops_adapters.verify())
        overwritten = found[f"{BDA}:{name}", "bias_dropout_add"]
        assert overwritten.startswith("overwritten by megatron_checks.equality.other_code_over"), (
            overwritten
        )
        captured = found[f"{BDA}:bias_dropout_add_fused_train", "bias_dropout_add"]
        assert captured == "captured too early by by_value", captured
    finally:
        module.bias_dropout_add_unfused = ours
        del sys.modules["by_value"]
    assert states(npu_ops_adapters.verify()) == dict.fromkeys(targets(), "applied")


@check("early")
def with_us_computed():
    RESULTS["with"] = compute()


@check("early")
def reverted():
    """Check that everything is restored, even functions of ours that others imported by value."""
    import npu_ops_adapters
    import torch

    ours = [held(target) for target, _ in TARGETS]
    originals = {target: inspect.unwrap(f) for (target, _), f in zip(TARGETS, ours, strict=True)}
    ours += [held(target) for target, _ in gdn_targets() if "HAVE_FLA" not in target]
    rows = npu_ops_adapters.revert()
    assert {row.sentence for row in rows} == {"reverted"} and len(rows) == len(targets())
    assert npu_ops_adapters.verify() == []
    holders = [key for key, value in snapshot().items() if any(value is f for f in ours)]
    assert holders == [], holders
    for target, original in originals.items():
        module, _, name = target.partition(":")
        current = held(target)
        if name == "jit_fuser":
            assert current is torch.compile
        elif name.startswith("fused_apply"):
            assert current is None
        else:
            assert current is original and current.__module__ == module, target
    for target, op in gdn_targets():
        value = held(target)
        is_method = op in ("gdn_gate", "gdn_decay", "rms_norm_gated")
        assert value.__module__ == gdn().__name__ if is_method else not value, target
    for name, module in sys.modules.items():
        if name.startswith("megatron.core."):
            assert getattr(module, "jit_fuser", torch.compile) is torch.compile, name
    assert not any(type(f).__module__ == "npu_ops_import_hook" for f in sys.meta_path)


@check("early")
def without_us_computed():
    RESULTS["without"], calls = compute(), dict(CALLS)
    assert calls == CALLS


@check("early")
def bias_dropout_add_equals_megatrons():
    compare("bda")


@check("early")
def rope_equals_megatrons():
    compare("rope")


@check("early")
def packed_rope_equals_megatrons():
    compare("packed rope")


@check("early")
def attention_equals_megatrons():
    compare("attention")


@check("early")
def bridge_equals_megatrons():
    compare("bridge")


@check("early")
def a_spec_by_hand_has_our_attention():
    """Without adapters: npuify leaves a given spec unchanged, and returns its own result as is."""
    import megatron_cpu
    import npu_ops_adapters.megatron
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from npu_ops_tools import demo_model

    config = types.SimpleNamespace(normalization="LayerNorm")
    spec = demo_model.layers(config)
    ours = npu_ops_adapters.megatron.npuify(spec)
    attention = spec.submodules.self_attention.submodules.core_attention
    assert attention is DotProductAttention
    assert npu_ops_adapters.megatron.npuify(ours) is ours
    assert ours.submodules.mlp is spec.submodules.mlp
    expected = megatron_cpu.step(megatron_cpu.gpt("rope"))
    actual, calls = calls_of("attention", megatron_cpu.step, megatron_cpu.gpt("rope", spec=ours))
    assert calls == 2
    for name, value in expected.items():
        assert (value - actual[name]).abs().max() < 1e-5, name


@check("early")
def the_model_equals_megatrons():
    compare("model")


@check("early")
def gated_delta_net_equals_megatrons():
    compare("gated delta net, model")
    compare("gated delta net, layer", unit=0, rounding=2**-5)  # several ops in sequence
