"""Check adapters that are applied after all of Megatron was imported, then reverted."""

from __future__ import annotations

import importlib
import inspect
import pathlib
import sys

from megatron_checks import release
from megatron_checks.results import RESULTS


@release.check("late")
def nothing_is_registered():
    release.import_everything()
    assert not any(type(f).__module__ == "npu_ops_import_hook" for f in sys.meta_path)


@release.check("late")
def jit_fuser_is_undone():
    """Every function decorated in the source is compiled before `apply`, and plain afterwards."""
    import npu_ops_adapters
    import torch
    from npu_ops_adapters.megatron import jit_fuser

    fixed, local = release.decorated_sites()
    compiled = {path: release.attribute(path, module) for path, module in fixed.items()}
    for path, value in compiled.items():
        assert hasattr(getattr(value, "__func__", value), "_torchdynamo_orig_callable"), path
    RESULTS["before"] = release.snapshot()

    found = release.states(npu_ops_adapters.apply())
    assert release.targets() < found.keys() and set(found.values()) == {"applied"}, found
    # each decorated function has its own patch
    assert len(found) - len(release.targets()) == len(fixed)
    assert set(jit_fuser.uncompiled()) == set(fixed)
    held = release.snapshot()
    for path, value in compiled.items():
        holders = [key for key, other in held.items() if other is value]
        assert holders == [], f"{path} is still compiled in {holders}"
    for path, module in (fixed | local).items():
        assert sys.modules[module].jit_fuser.__name__ == "npu_ops_leave_uncompiled", path
    assert torch.compile.__module__ == "torch"
    assert set(release.states(npu_ops_adapters.verify()).values()) == {"applied"}


@release.check("late")
def what_says_torch_compile_stays_compiled():
    """Some methods of the router deliberately use torch.compile itself."""
    router = importlib.import_module("megatron.core.transformer.moe.router")
    source = pathlib.Path(router.__file__).read_text()
    compiled = [
        raw
        for value in vars(router).values()
        if isinstance(value, type) and value.__module__ == router.__name__
        for raw in vars(value).values()
        if hasattr(getattr(raw, "__func__", raw), "_torchdynamo_orig_callable")
    ]
    assert len(compiled) == source.count("    @torch.compile\n")


@release.check("late")
def importers_by_value_have_ours():
    """rotary_pos_embedding imports the functions of rope_utils; so may models elsewhere."""
    module = importlib.import_module("megatron.core.models.common.embeddings.rotary_pos_embedding")
    for name in ("_apply_rotary_pos_emb_bshd", "_apply_rotary_pos_emb_thd"):
        assert getattr(module, name) is getattr(sys.modules[release.ROPE], name)


@release.check("late")
def a_model_trains_uncompiled():
    import megatron_cpu
    import torch

    for position in ("rope", "mrope"):
        model = megatron_cpu.gpt(position, bias_dropout_fusion=True, apply_rope_fusion=True)
        result, calls = release.calls_of("bias_dropout_add", megatron_cpu.step, model)
        assert calls == 4 and torch.isfinite(result["loss"])
    assert not torch._dynamo.utils.counters["frames"]


@release.check("late")
def every_object_is_put_back():
    import npu_ops_adapters

    assert {row.sentence for row in npu_ops_adapters.revert()} == {"reverted"}
    assert release.changed(RESULTS["before"], release.snapshot()) == []


@release.check("late")
def it_can_be_applied_and_put_back_again():
    import npu_ops_adapters

    assert set(release.states(npu_ops_adapters.apply()).values()) == {"applied"}
    assert release.states(npu_ops_adapters.apply()) == release.states(npu_ops_adapters.plan())
    npu_ops_adapters.revert()
    assert release.changed(RESULTS["before"], release.snapshot()) == []


@release.check("late")
def modules_run_again_are_patched_again():
    import npu_ops_adapters

    npu_ops_adapters.apply()
    for name in (release.BDA, release.ROPE):
        importlib.reload(sys.modules[name])
        found = release.states(npu_ops_adapters.verify())
        assert release.targets() <= found.keys() and set(found.values()) == {"applied"}, found
    train = sys.modules[release.BDA].bias_dropout_add_fused_train
    assert inspect.unwrap(train).__globals__ is vars(sys.modules[release.BDA])
    assert train.__wrapped__ is inspect.unwrap(train)  # wrapped only once
    npu_ops_adapters.revert()
    assert sys.modules[release.BDA].bias_dropout_add_unfused.__module__ == release.BDA
