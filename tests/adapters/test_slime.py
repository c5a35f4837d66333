"""Test the adapters for slime on a stand-in; upstream_slime_newest.py runs slime itself."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pathlib
import subprocess
import sys
import types

import fetch_frameworks
import npu_ops_adapters
import pytest
import torch
from npu_ops_adapters.slime import resources
from processes import environment

from npu_ops.core import env, hardware, log

HERE = pathlib.Path(__file__).parent
FLA = "fla.ops.gated_delta_rule"


class Group:
    def __getattr__(self, name):
        return lambda *args: (name, args)


@pytest.fixture
def npu(monkeypatch):
    """A process with slime, MindSpeed and two NPUs, patched by npu-ops."""
    sys.path.insert(0, str(HERE / "doubles"))
    module = types.SimpleNamespace(device_count=lambda: 2, is_available=lambda: True)
    monkeypatch.setattr(torch, "npu", module, raising=False)
    monkeypatch.setattr(hardware, "is_npu", lambda: True)
    monkeypatch.setattr(log, "_said", set())
    adaptor = types.ModuleType("mindspeed.megatron_adaptor")
    adaptor.told = []
    adaptor.repatch = lambda args: adaptor.told.append(args)
    found = importlib.import_module

    def import_module(name, *args):
        if name == adaptor.__name__:
            return sys.modules.setdefault(name, adaptor)
        return found(name, *args)

    monkeypatch.setattr(importlib, "import_module", import_module)
    monkeypatch.delitem(sys.modules, adaptor.__name__, raising=False)
    npu_ops_adapters.revert()
    npu_ops_adapters.apply()
    yield adaptor
    npu_ops_adapters.revert()
    sys.modules.pop(adaptor.__name__, None)


def states() -> dict[str, str]:
    rows = npu_ops_adapters.plan()
    return {row.target.partition(":")[2]: row.sentence for row in rows if "slime" in row.target}


def test_slime_takes_the_npu(npu):
    chosen = importlib.import_module("slime.utils.accelerator").initialize_accelerator()
    assert (chosen.name, chosen.device_type, chosen.device_count()) == ("npu", "npu", 2)
    assert chosen.communication_backend_name == "hccl"
    assert chosen.visible_devices_env == "ASCEND_RT_VISIBLE_DEVICES"
    npu_ops_adapters.revert()
    assert sys.modules["slime.utils.accelerator"]._REGISTRY == {}


def test_without_an_npu_slime_is_left_alone(npu, monkeypatch):
    monkeypatch.setattr(hardware, "is_npu", lambda: False)
    home = importlib.import_module("slime.backends.megatron_utils")
    assert home.chosen.name == "cuda" and not home.mindspeed_was_first
    assert not [row for row in npu_ops_adapters.verify() if "slime" in row.target]
    monkeypatch.setitem(sys.modules, "slime.ray", types.ModuleType("slime.ray"))
    assert not states()


def test_a_registry_that_looks_otherwise_is_left_alone(npu, monkeypatch):
    home = importlib.import_module("slime.utils.accelerator")
    npu_ops_adapters.revert()
    monkeypatch.setitem(home._REGISTRY, "npu", "slime's own")
    npu_ops_adapters.apply()
    assert states()["_REGISTRY.npu"] == "refused: slime has its own accelerator for NPUs"
    monkeypatch.delitem(home._REGISTRY, "npu")
    monkeypatch.setattr(home, "_BackendRegistration", dataclasses.make_dataclass("Other", ["a"]))
    assert "got fields ('a',), needs ('factory'," in states()["_REGISTRY.npu"]
    monkeypatch.delattr(home, "_BackendRegistration")
    assert "AttributeError" in states()["_REGISTRY.npu"]


def test_mindspeed_comes_before_megatron_and_learns_the_arguments(npu):
    importlib.import_module("slime.utils.accelerator")
    assert npu.__name__ not in sys.modules  # SGLang's processes need no MindSpeed
    assert importlib.import_module("slime.backends.megatron_utils").mindspeed_was_first
    actor = importlib.import_module("slime.backends.megatron_utils.actor")
    actor.init(types.SimpleNamespace(hidden_size=64))
    assert [vars(args) for args in npu.told] == [{"hidden_size": 64}]
    assert sys.modules["slime.backends.megatron_utils.initialize"].steps == ["init"]


@pytest.mark.parametrize("first", ["", "import torch; "])
def test_mindspeed_comes_first_in_a_process_of_ray(first, tmp_path):
    """Ray imports slime's trainer before torch, so before npu-ops."""
    (tmp_path / "mindspeed").mkdir()
    for name in ("__init__", "megatron_adaptor"):
        (tmp_path / "mindspeed" / f"{name}.py").touch()
    code = f"{first}import slime.backends.megatron_utils as m; print(m.mindspeed_was_first)"
    command = ["-m", "npu_ops_emulator", "--", sys.executable, "-c", code]
    done = subprocess.run(
        [sys.executable, *command], env=environment(tmp_path, HERE / "doubles"),
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == "True\n", done.stderr[-3000:]


def test_a_switch_leaves_mindspeed_to_the_user(npu):
    npu_ops_adapters.revert()
    with env.override(disable=frozenset({"slime_mindspeed"})):
        npu_ops_adapters.apply()
        home = importlib.import_module("slime.backends.megatron_utils")
    assert home.chosen.name == "npu" and not home.mindspeed_was_first


def test_slimes_layers_have_flas_function_and_not_mindspeeds(npu, monkeypatch):
    own, placed = (lambda: "fla's"), (lambda: "MindSpeed's")
    own.__module__ = "fla.ops.gated_delta_rule.chunk"
    patch = types.SimpleNamespace(orig_func=own, final_patch_func=placed)
    manager = types.SimpleNamespace(patches_info={f"{FLA}.chunk_gated_delta_rule": patch})
    registry = types.SimpleNamespace(MindSpeedPatchesManager=manager)
    package = types.SimpleNamespace(chunk_gated_delta_rule=placed)
    monkeypatch.setitem(sys.modules, "mindspeed.patch_utils", registry)
    monkeypatch.setitem(sys.modules, FLA, package)
    choose = importlib.import_module("slime_plugins.models.qwen_gdn_backend")
    assert choose.get_chunk_gated_delta_rule("fla") is own
    assert choose.get_chunk_gated_delta_rule("flashqla") == "flashqla"
    patch.orig_func = lambda: "raises, for fla is not installed"
    assert choose.get_chunk_gated_delta_rule("fla") is placed
    package.chunk_gated_delta_rule = own
    assert choose.get_chunk_gated_delta_rule("fla") is own
    npu_ops_adapters.revert()
    package.chunk_gated_delta_rule = placed
    assert choose.get_chunk_gated_delta_rule("fla") is placed


def test_collectives_of_newer_torch_are_passed_on(npu, monkeypatch):
    for name in ("allgather", "reduce_scatter_single"):
        method = getattr(torch.distributed.ProcessGroup, name, None) or (lambda self: None)
        monkeypatch.setattr(torch.distributed.ProcessGroup, name, method, raising=False)
    groups = importlib.import_module("slime.utils.reloadable_process_group")
    group = groups.ReloadableProcessGroup(Group())
    assert group.reduce_scatter_single(1, 2) == ("reduce_scatter_single", (1, 2))
    npu_ops_adapters.revert()
    assert "reduce_scatter_single" not in vars(groups.ReloadableProcessGroup)


def test_qwen3_5_with_pictures_has_mrope_and_takes_odd_lengths(npu):
    model = importlib.import_module("slime_plugins.models.qwen3_5_vl").Qwen3_5VLModel
    rest = {"pre_process": True, "post_process": True, "vp_stage": None}
    from_arguments = types.SimpleNamespace(position_embedding_type="rope")
    made = model(from_arguments, None, None, None, **rest)
    assert made.rope == "mrope"
    assert model(types.SimpleNamespace(), None, None, None, **rest).rope == "mrope"
    assert made.tokens(torch.tensor([0, 3, 8]), 1, 0, "cpu").tolist() == list(range(8))
    assert made.tokens([0, 8], 2, 0, "cpu") == "chunks"


def test_qwen3_next_of_v0_2_2_learns_lengths_and_is_not_summed_twice(npu, monkeypatch, caplog):
    parallel = types.SimpleNamespace(
        gather_from_sequence_parallel_region=lambda x, **options: options, other="Megatron's"
    )
    core = types.SimpleNamespace(tensor_parallel=parallel)
    monkeypatch.setitem(sys.modules, "megatron.core", core)
    plugins = "slime_plugins.models"
    layers, around = (
        importlib.import_module(f"{plugins}.{name}") for name in ("qwen3_next", "hf_attention")
    )
    layer = layers.Qwen3NextGatedDeltaNet()
    assert [layer.forward(None, [0, 4]) for _ in range(2)] == [[0, 4]] * 2
    assert layers.chunk_gated_delta_rule(None) is None
    assert layers.chunk_gated_delta_rule(None, cu_seqlens=[0, 2]) == [0, 2]
    gathered = around.HuggingfaceAttention().forward(None)
    assert gathered == {"group": "ranks", "tensor_parallel_output_grad": False}
    assert around.tensor_parallel.other == "Megatron's"
    assert caplog.text.count("#1686") == caplog.text.count("#1748") == 1
    npu_ops_adapters.revert()
    assert layer.forward(None, [0, 4]) is None and around.tensor_parallel is parallel


def test_a_qwen3_next_that_passes_lengths_itself_is_left_alone(npu, monkeypatch):
    npu_ops_adapters.revert()
    importlib.import_module("slime_plugins.models.qwen3_next")
    source = "self.conv1d(x, cu_seqlens=cu_seqlens); rule(x, cu_seqlens=cu_seqlens)"
    monkeypatch.setattr("inspect.getsource", lambda function: source)
    assert not [name for name in states() if name.startswith("Qwen3NextGatedDeltaNet")]


ENGINE = "slime.backends.sglang_utils.sglang_engine"


def test_arguments_of_a_newer_sglang_are_read(npu, monkeypatch):
    names = types.SimpleNamespace(
        record_fields=lambda kind: [types.SimpleNamespace(name=x) for x in kind.__records__]
    )
    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups.arg_utils", names)
    engine = importlib.import_module(ENGINE)
    assert engine.names_of_arguments() == ["tp_size", "port"]
    assert engine.dataclasses.field is dataclasses.field
    npu_ops_adapters.revert()
    assert engine.dataclasses is dataclasses
    monkeypatch.delattr(names, "record_fields")
    assert "has no record_fields" in states()["dataclasses"]
    monkeypatch.setattr(engine, "ServerArgs", dataclasses.make_dataclass("Args", ["port"]))
    assert "dataclasses" not in states()
    assert engine.names_of_arguments() == ["port"]


def test_sglang_takes_weights_within_a_session(npu):
    engine = importlib.import_module(ENGINE).SGLangEngine()
    for _ in range(2):
        engine.pause_generation()
        engine.update_weights_from_distributed([], [], [], "slime")
        engine.update_weights_from_tensor([])
        engine.continue_generation()
    sent = ["begin_weight_update", "distributed", "tensor", "end_weight_update"]
    assert engine.asked == ["pause", *sent, "continue"] * 2
    engine.asked.clear()
    engine.update_weights_from_disk("folder")
    engine.continue_generation()
    assert engine.asked == ["disk", "continue"]


def test_an_earlier_sglang_has_no_session(npu):
    home = importlib.import_module(ENGINE)
    engine = home.SGLangEngine(begins=404)
    for _ in range(2):
        engine.update_weights_from_tensor([])
        engine.continue_generation()
    assert engine.asked == ["tensor", "continue"] * 2
    failing = home.SGLangEngine(begins=503)
    with pytest.raises(home.requests.exceptions.HTTPError):
        failing.update_weights_from_tensor([])
    assert failing.asked == []


def test_a_provider_of_megatron_bridge_has_slimes_arguments(npu, monkeypatch):
    class TransformerConfig:
        recompute_granularity, hidden_size = None, 64

        def finalize(self):
            self.final = True

    home = "megatron.bridge.models.transformer_config"
    config = types.SimpleNamespace(TransformerConfig=TransformerConfig)
    full = types.SimpleNamespace(recompute_granularity="full", hidden_size=1, moe_zero_memory="x")
    arguments = types.SimpleNamespace(get_full_args=lambda: full)
    monkeypatch.setitem(sys.modules, home, config)
    monkeypatch.setitem(sys.modules, "mindspeed.args_utils", arguments)
    npu_ops_adapters.apply()
    TransformerConfig().finalize()
    assert not hasattr(TransformerConfig, "moe_zero_memory")
    importlib.import_module("slime")
    provider = TransformerConfig()
    provider.finalize()
    found = (provider.recompute_granularity, provider.hidden_size, provider.moe_zero_memory)
    assert provider.final and found == ("full", 64, "x")


@pytest.mark.parametrize(
    "cluster, asked, got",
    [
        ({"NPU": 2, "CPU": 4}, {"GPU": 0.4, "CPU": 1}, {"NPU": 0.4, "CPU": 1}),
        ({"NPU": 2, "CPU": 4}, {"GPU": 0, "CPU": 1}, {"GPU": 0, "CPU": 1}),
        ({"NPU": 2, "GPU": 2}, {"GPU": 1}, {"GPU": 1}),
        ({"CPU": 4}, {"GPU": 1}, {"GPU": 1}),
    ],
)
def test_gpus_are_npus_where_the_cluster_has_no_gpus(cluster, asked, got, monkeypatch):
    ray = types.SimpleNamespace(is_initialized=lambda: True, cluster_resources=lambda: cluster)
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert resources.of_npus(asked) == got


def test_ray_places_slimes_actors_on_npus(tmp_path):
    """Ray is told that it has two NPUs; without npu-ops it cannot place slime's actors."""
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").touch()
    done = subprocess.run(
        [sys.executable, str(HERE / "slime_on_ray.py")],
        env=environment(
            tmp_path, HERE / "doubles", fetch_frameworks.tree("ray-2.55.1"),
            RAY_USAGE_STATS_ENABLED="0",
        ),
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == {"devices": [0, 1], "trainers": [0, 1], "left": 0.0}
