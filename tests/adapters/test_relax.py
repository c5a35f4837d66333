"""Test the adapters for Relax on a stand-in; tests/trainers/upstream_relax.py runs Relax itself."""

from __future__ import annotations

import argparse
import importlib
import pathlib
import sys
import types

import npu_ops_adapters
import pytest
import torch

from npu_ops.core import env, hardware, log

HERE = pathlib.Path(__file__).parent
PROFILE = "mindspeed.features_manager.functional.profile"
GROUPS = "relax.utils.reloadable_process_group"
LAYER = "mindspeed_bridge.models.qwen_vl.modelling_qwen3_vl.gated_delta_net"
GRADIENTS = "megatron.core.distributed.finalize_model_grads"


class Group:
    def __getattr__(self, name):
        return lambda *args: (name, args)


@pytest.fixture
def npu(monkeypatch):
    """A process with Relax, MindSpeed and an NPU, patched by npu-ops."""
    sys.path.insert(0, str(HERE / "doubles"))
    for name in ("allgather", "reduce_scatter_single"):  # names in torch 2.13
        method = getattr(torch.distributed.ProcessGroup, name, None) or (lambda self: None)
        monkeypatch.setattr(torch.distributed.ProcessGroup, name, method, raising=False)
    monkeypatch.setattr(hardware, "is_npu", lambda: True)
    monkeypatch.setattr(log, "_said", set())
    npu_ops_adapters.revert()
    npu_ops_adapters.apply()
    yield
    npu_ops_adapters.revert()


def states() -> dict[str, str]:
    rows = npu_ops_adapters.plan()
    return {row.target: row.sentence for row in rows if row.op.startswith("relax")}


def parser() -> argparse.ArgumentParser:
    """Return a parser with an option of Relax's, which MindSpeed also adds."""
    options = argparse.ArgumentParser()
    options.add_argument("--profile-with-stack", action="store_true")
    return options


def test_options_that_both_define_are_relaxs(npu):
    importlib.import_module("relax.backends.megatron")
    feature = importlib.import_module(PROFILE).ProfileFeature()
    options = parser()
    feature.register_args(options)
    found = options.parse_args(["--profile-with-stack", "--profile-save-path", "x"])
    assert vars(found) == {
        "profile_with_stack": True, "profile_level": "level0", "profile_save_path": "x",
    }  # fmt: skip
    npu_ops_adapters.revert()
    with pytest.raises(argparse.ArgumentError, match="conflicting option"):
        feature.register_args(parser())


def test_an_option_of_another_kind_stays_a_conflict(npu):
    importlib.import_module("relax.backends.megatron")
    feature = importlib.import_module(PROFILE).ProfileFeature()
    options = argparse.ArgumentParser()
    options.add_argument("--profile-with-stack", type=int)
    with pytest.raises(argparse.ArgumentError, match="conflicting option"):
        feature.register_args(options)


def test_collectives_of_newer_torch_are_passed_on(npu):
    groups = importlib.import_module(GROUPS)
    group = groups.ReloadableProcessGroup(Group())
    assert group.reduce_scatter_single(1, 2) == ("reduce_scatter_single", (1, 2))
    npu_ops_adapters.revert()
    assert "reduce_scatter_single" not in vars(groups.ReloadableProcessGroup)


def test_a_group_that_passes_calls_on_otherwise_is_refused(npu, monkeypatch):
    groups = importlib.import_module(GROUPS)
    npu_ops_adapters.revert()
    monkeypatch.delattr(groups.ReloadableProcessGroup, "_fwd")
    npu_ops_adapters.apply()
    refused = "refused: ReloadableProcessGroup has no _fwd, the method that forwards calls"
    assert states()[f"{GROUPS}:ReloadableProcessGroup.reduce_scatter_single"] == refused


def test_mindspeed_bridges_layer_has_the_settings_that_it_asks_for(npu):
    importlib.import_module("relax.backends.megatron")
    layer = importlib.import_module(LAYER).GatedDeltaNet
    config = types.SimpleNamespace(use_ascend_gdn=True)
    assert layer(config).rule == "ascend" and config.use_triton_gdn is False
    npu_ops_adapters.revert()
    with pytest.raises(AttributeError, match="use_triton_gdn"):
        layer(types.SimpleNamespace())


def test_a_layer_that_takes_no_configuration_is_refused(npu, monkeypatch):
    importlib.import_module("relax.backends.megatron")
    npu_ops_adapters.revert()
    layer = importlib.import_module(LAYER).GatedDeltaNet
    monkeypatch.setattr(layer, "__init__", lambda self, sizes: None)
    npu_ops_adapters.apply()
    refused = "refused: its first parameters: got ('self', 'sizes')"
    assert states()[f"{LAYER}:GatedDeltaNet.__init__"] == refused


def test_a_switch_leaves_each_out(npu):
    npu_ops_adapters.revert()
    with env.override(disable=frozenset({"relax_arguments"})):
        npu_ops_adapters.apply()
        importlib.import_module("relax.backends.megatron")
        feature = importlib.import_module(PROFILE).ProfileFeature()
        with pytest.raises(argparse.ArgumentError):
            feature.register_args(parser())


def test_without_an_npu_relax_is_left_alone(npu, monkeypatch):
    monkeypatch.setattr(hardware, "is_npu", lambda: False)
    for name in ("relax.backends.megatron", GROUPS, PROFILE):
        importlib.import_module(name)
    assert not states()


def test_mindspeed_in_another_process_is_left_alone(npu):
    importlib.import_module(PROFILE)
    assert not states()


# Gradients of Gated Delta Net's norm, in Megatron-LM


class GatedDeltaNet(torch.nn.Module):
    """A layer of which each of two ranks has half of the heads."""

    __module__ = "megatron.core.ssm.gated_delta_net"
    tp_size = 2

    def __init__(self, gradient: float):
        super().__init__()
        self.out_norm = torch.nn.LayerNorm(3, bias=False)
        self.out_norm.weight.main_grad = torch.full((3,), gradient)


class Whole(GatedDeltaNet):
    """A layer that each rank computes whole, e.g. slime's."""


def finalize(model, config, tp_group=None):
    return "Megatron-LM's"


@pytest.fixture
def megatron(npu, monkeypatch):
    """Megatron-LM's function on two ranks with equal gradients."""
    home = types.ModuleType(GRADIENTS)
    home._allreduce_non_tensor_model_parallel_grads = finalize
    monkeypatch.setitem(sys.modules, GRADIENTS, home)
    state = types.SimpleNamespace(get_tensor_model_parallel_group=lambda: "ranks")
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, group: x.mul_(2))
    monkeypatch.setattr("inspect.getsource", lambda module: "")
    npu_ops_adapters.apply()
    return home


def gradients(home, sequence_parallel: bool) -> list[float]:
    """Return the norms' gradients: of two Megatron-LM layers, and of one that is computed whole."""
    model = torch.nn.Sequential(GatedDeltaNet(1.0), GatedDeltaNet(2.0), Whole(4.0))
    config = types.SimpleNamespace(sequence_parallel=sequence_parallel)
    assert home._allreduce_non_tensor_model_parallel_grads([model], config) == "Megatron-LM's"
    return [layer.out_norm.weight.main_grad.mean().item() for layer in model]


def test_gradients_of_out_norm_are_added_where_sequences_are_whole(megatron, caplog):
    assert gradients(megatron, sequence_parallel=False) == [2, 4, 4]
    assert gradients(megatron, sequence_parallel=True) == [1, 2, 4]
    assert gradients(megatron, sequence_parallel=False) == [2, 4, 4]
    assert caplog.text.count("NPU_OPS_DISABLE=gdn_gradients turns this off") == 1
    npu_ops_adapters.revert()
    assert gradients(megatron, sequence_parallel=False) == [1, 2, 4]


def test_a_megatron_that_adds_them_itself_is_refused(megatron, monkeypatch):
    npu_ops_adapters.revert()
    monkeypatch.setattr("inspect.getsource", lambda module: "if 'out_norm' in name:")
    rows = npu_ops_adapters.plan()
    said = {row.sentence for row in rows if row.op == "gdn_gradients"}
    assert said == {"refused: Megatron-LM adds these gradients itself"}
