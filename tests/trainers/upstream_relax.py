"""Relax's trainer with its NPU patches, with npu-ops instead, and the truth from the CPU.

    python tests/trainers/fetch_relax.py Relax Megatron-LM MindSpeed TransferQueue
    python -m pytest tests/trainers/upstream_relax.py

Four GRPO steps in fp32 as in upstream_slime.py, of which Relax's trainer is a descendant.
"""

from __future__ import annotations

import pytest
import relax_runs
from upstream_slime import is_by_npu_ops, is_by_torch_npu


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("relax")
    relax_runs.write(folder)
    return folder


@pytest.fixture(scope="module")
def truth(folder):
    """On the CPU, one rank."""
    return relax_runs.run(folder, "truth")


@pytest.mark.parametrize("devices", [1, 2])
def test_with_npu_ops(devices, folder, truth):
    is_by_npu_ops(relax_runs.run(folder, "npu_ops", devices=devices), truth, devices)


@pytest.mark.parametrize("devices", [1, 2])
def test_with_relaxs_patches(devices, folder, truth):
    is_by_torch_npu(relax_runs.run(folder, "shipped", devices=devices), truth)
