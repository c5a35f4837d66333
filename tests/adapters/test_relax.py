"""Relax on NPUs, on a double of it: tests/trainers/upstream_relax.py runs Relax itself."""

from __future__ import annotations

import argparse
import importlib
import pathlib
import sys

import npu_ops_adapters
import pytest
import torch

from npu_ops.core import env, hardware, log

HERE = pathlib.Path(__file__).parent
PROFILE = "mindspeed.features_manager.functional.profile"
GROUPS = "relax.utils.reloadable_process_group"


class Group:
    def __getattr__(self, name):
        return lambda *args: (name, args)


@pytest.fixture
def npu(monkeypatch):
    """A process with Relax, MindSpeed and an NPU, into which npu-ops has been put."""
    sys.path.insert(0, str(HERE / "doubles"))
    for name in ("allgather", "reduce_scatter_single"):  # torch 2.13's
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
    """Of a command line to which Relax has added its options, and MindSpeed adds its."""
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
    refused = "refused: ReloadableProcessGroup has no _fwd, by which it passes calls on"
    assert states()[f"{GROUPS}:ReloadableProcessGroup.reduce_scatter_single"] == refused


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
