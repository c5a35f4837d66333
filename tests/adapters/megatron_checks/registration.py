"""Check adapters that are registered before Megatron is imported; its layers use npu-ops."""

from __future__ import annotations

import inspect
import sys
import types

from megatron_checks import release


@release.check("early")
def registered_as_torch_is_imported():
    import npu_ops_import_hook

    assert type(sys.meta_path[0]).__module__ == npu_ops_import_hook.__name__, sys.meta_path
    assert "npu_ops_adapters" not in sys.modules and "npu_ops" not in sys.modules
    release.import_everything()
    assert "npu_ops_adapters" in sys.modules


@release.check("early")
def every_patch_is_applied():
    import npu_ops_adapters

    assert release.states(npu_ops_adapters.plan()) == dict.fromkeys(release.targets(), "applied")
    assert release.states(npu_ops_adapters.verify()) == dict.fromkeys(release.targets(), "applied")


@release.check("early")
def jit_fuser_compiles_nothing():
    """Our decorator saw exactly the functions decorated in the source, and compiled
    none of them."""
    from npu_ops_adapters.megatron import jit_fuser

    fixed, local = release.decorated_sites()
    assert len(fixed) > 20
    assert set(jit_fuser.uncompiled()) == set(fixed)
    for path, module in fixed.items():
        value = release.attribute(path, module)
        function = inspect.unwrap(getattr(value, "__func__", value))
        assert not hasattr(function, "_torchdynamo_orig_callable"), path
    for path, module in local.items():  # decorated when a layer is built
        function = types.FunctionType(compile("0", path, "eval"), {})
        assert sys.modules[module].jit_fuser(function) is function


@release.check("early")
def applied_twice_is_applied_once():
    import npu_ops_adapters

    before = release.snapshot()
    assert release.states(npu_ops_adapters.apply()) == dict.fromkeys(release.targets(), "applied")
    assert release.changed(before, release.snapshot()) == []


@release.check("early")
def rope_fusion_is_a_valid_configuration():
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4}
    assert TransformerConfig(**config, apply_rope_fusion=True).apply_rope_fusion


@release.check("early")
def a_layer_takes_our_functions():
    """Megatron's build_module accepts only plain functions and classes."""
    module = sys.modules[release.BDA]
    for function in (
        module.bias_dropout_add_fused_train,
        module.bias_dropout_add_fused_inference,
        module.bias_dropout_add_unfused,
        module.bias_dropout_add_unfused(True),
    ):
        assert isinstance(function, types.FunctionType)
        assert function.__name__.startswith("npu_ops_")
