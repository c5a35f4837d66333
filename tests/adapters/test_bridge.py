"""Test the adapters for Megatron-Bridge's Qwen3-VL on a stand-in, called as trainers call it.

tests/trainers/upstream_slime.py and upstream_slime_newest.py train the real one.
"""

from __future__ import annotations

import functools
import importlib
import pathlib
import sys
import types

import npu_ops_adapters
import pytest
import torch

from npu_ops.core import hardware, log

DOUBLES = pathlib.Path(__file__).parent / "doubles"
HOME = "megatron.bridge.models.qwen_vl"


class SumOverTwo(torch.autograd.Function):
    """Megatron-LM's function. It sums gradients over two ranks, which are equal here."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


@pytest.fixture
def bridge(monkeypatch):
    """Yield the model's module on an NPU, patched by npu-ops."""
    sys.path.insert(0, str(DOUBLES))
    monkeypatch.setattr(hardware, "is_npu", lambda: True)
    monkeypatch.setattr(log, "_said", set())
    parallel = types.SimpleNamespace(copy_to_tensor_model_parallel_region=SumOverTwo.apply)
    groups = types.SimpleNamespace(use_mpu_process_groups=lambda: "Megatron's")
    config = types.SimpleNamespace(ProcessGroupCollection=groups)
    for name, module in {"tensor_parallel": parallel, "process_groups_config": config}.items():
        monkeypatch.setitem(sys.modules, f"megatron.core.{name}", module)
    npu_ops_adapters.revert()
    npu_ops_adapters.apply()
    yield importlib.import_module(f"{HOME}.modelling_qwen3_vl.model")
    npu_ops_adapters.revert()


def trained(module) -> torch.Tensor:
    """Return the gradient on the first of two ranks, for features that both ranks use."""
    features = torch.ones(4, requires_grad=True)
    (part,) = module.Qwen3VLModel().parts([features], 2, 0)
    part.sum().backward()
    return features.grad


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="NVTX works")
def test_marks_and_gradients(bridge, caplog):
    assert trained(bridge).tolist() == [2, 2, 0, 0]
    assert trained(bridge).tolist() == [2, 2, 0, 0]
    assert caplog.text.count("Megatron-Bridge loses gradients of deepstack's features") == 1
    npu_ops_adapters.revert()
    with pytest.raises(RuntimeError, match="NVTX"):
        trained(bridge)


def test_mindspeeds_wrapper_that_is_for_a_later_bridge_is_passed_by(bridge):
    npu_ops_adapters.revert()
    own = bridge.split_deepstack_embs

    @functools.wraps(own)
    def wrapper(masks, embeds, tp_size=1, tp_rank=0, sequence_parallel=False):
        return own(masks, embeds, tp_size, tp_rank, sequence_parallel=sequence_parallel)

    bridge.split_deepstack_embs = wrapper
    npu_ops_adapters.apply()
    assert trained(bridge).tolist() == [2, 2, 0, 0]


def test_a_bridge_that_adds_gradients_itself_is_left_alone(bridge, monkeypatch):
    npu_ops_adapters.revert()
    source = "x = copy_to_tensor_model_parallel_region(x)"
    monkeypatch.setattr("inspect.getsource", lambda module: source)
    states = {row.target: row.sentence for row in npu_ops_adapters.plan()}
    said = states[f"{bridge.__name__}:split_deepstack_embs"]
    assert said == "refused: Megatron-Bridge adds these gradients itself"


@pytest.mark.parametrize("name", ["Qwen3VLModelProvider", "Qwen3VLMoEModelProvider"])
def test_a_provider_asks_megatron_for_groups_that_nobody_has_set(bridge, name):
    kind = getattr(importlib.import_module(f"{HOME}.qwen3_vl_provider"), name)
    provider = kind()
    assert provider.provide(pre_process=True) == ("Megatron's", True)
    provider._pg_collection = "the trainer's"
    assert provider.provide() == ("the trainer's", None)


def test_a_name_that_an_earlier_megatron_lacks(bridge, monkeypatch):
    variant = "experimental_attention_variant"
    home = types.ModuleType(f"megatron.core.models.gpt.{variant}_module_specs")
    monkeypatch.setitem(sys.modules, home.__name__, home)
    npu_ops_adapters.apply()
    name = f"get_transformer_block_with_{variant}_spec"
    with pytest.raises(NotImplementedError, match=f"this Megatron-LM has no {name}"):
        getattr(home, name)()
    npu_ops_adapters.revert()
    assert not hasattr(home, name)


def test_without_an_npu_bridge_is_left_alone(bridge, monkeypatch):
    npu_ops_adapters.revert()
    monkeypatch.setattr(hardware, "is_npu", lambda: False)
    npu_ops_adapters.apply()
    assert not [row for row in npu_ops_adapters.verify() if "deepstack" in row.target]
