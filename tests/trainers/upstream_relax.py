"""Test Relax with npu-ops, and its trainer with its own NPU patches, against the CPU.

    python tests/trainers/fetch_relax.py Relax Megatron-LM MindSpeed TransferQueue MindSpeed-Bridge
    python -m pytest tests/trainers/upstream_relax.py

Four GRPO steps in fp32 as in upstream_slime.py: Relax's trainer was derived from slime's. With
npu-ops Relax's own program runs without patches, and no module is written for it.
"""

from __future__ import annotations

import pytest
import relax_runs as runs
from upstream_slime import DELTA_NET, VISION, called, is_by_npu_ops, is_by_torch_npu

GATES = ("gdn_gate", "l2norm")


@pytest.mark.parametrize("devices", [1, 2])
def test_with_npu_ops(devices, folder, truth):
    found = runs.run(folder, "npu_ops", devices=devices)
    is_by_npu_ops(found, truth("qwen3"), devices)


@pytest.mark.parametrize("devices", [1, 2])
def test_with_relaxs_patches(devices, folder, truth):
    is_by_torch_npu(runs.run(folder, "shipped", devices=devices), truth("qwen3"))


def test_pictures_with_npu_ops(folder, truth):
    """Megatron-Bridge's Qwen3-VL with a picture in each answer; its layers are recomputed."""
    found = runs.run(folder, "npu_ops", "qwen3_vl")
    is_by_npu_ops(found, truth("qwen3_vl"), 1)
    called(found, VISION)


def test_pictures_with_relaxs_patches(folder, truth):
    """Train Qwen3-VL without recomputation, which cannot save deepstack's list of tensors."""
    is_by_torch_npu(runs.run(folder, "shipped", "qwen3_vl"), truth("qwen3_vl"))


@pytest.mark.parametrize("devices", [1, 2])
def test_gated_delta_net_with_npu_ops(devices, folder, truth):
    """MindSpeed-Bridge's Qwen3.5; the reference uses Megatron's own layers."""
    found = runs.run(folder, "npu_ops", "qwen3_5", devices, "split")
    is_by_npu_ops(found, truth("qwen3_5"), devices)
    called(found, DELTA_NET + GATES)


@pytest.mark.parametrize("devices", [1, 2])
def test_gated_delta_net_with_relaxs_patches(devices, folder, truth):
    """Train Qwen3.5 with MindSpeed-Bridge's PyTorch delta rule, as its kernels take only bf16."""
    found = runs.run(folder, "shipped", "qwen3_5", devices, "split")
    is_by_torch_npu(found, truth("qwen3_5"))


def test_gated_delta_net_of_whole_sequences(folder, truth):
    """Two ranks without --sequence-parallel: npu-ops sums the gradient of `out_norm` over them."""
    found = runs.run(folder, "npu_ops", "qwen3_5", 2)
    is_by_npu_ops(found, truth("qwen3_5"), 2)
    called(found, DELTA_NET + GATES)
