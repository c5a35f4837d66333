"""Relax's trainer with its NPU patches, with npu-ops instead, and the truth from the CPU.

    python tests/trainers/fetch_relax.py Relax Megatron-LM MindSpeed TransferQueue
    python -m pytest tests/trainers/upstream_relax.py

Four GRPO steps in fp32 as in upstream_slime.py, of which Relax's trainer is a descendant.
"""

from __future__ import annotations

import pytest
import relax_runs
from upstream_slime import FUSED, OPERATORS, agree, called


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
    found = relax_runs.run(folder, "npu_ops", devices=devices)
    agree(found, truth)
    assert len(found.calls) == devices
    called(found, OPERATORS + FUSED)


@pytest.mark.parametrize("devices", [1, 2])
def test_with_relaxs_patches(devices, folder, truth):
    found = relax_runs.run(folder, "shipped", devices=devices)
    agree(found, truth)
    called(found, ("npu_fusion_attention", "npu_rms_norm", *FUSED))
    assert not any(name in calls for calls in found.calls for name in OPERATORS), found.calls
