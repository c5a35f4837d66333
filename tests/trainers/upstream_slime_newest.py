"""Test slime of August 2026: its own train.py with npu-ops, against a reference on the CPU.

    python tests/trainers/fetch_slime_newest.py slime Megatron-LM MindSpeed
    python -m pytest tests/trainers/upstream_slime_newest.py

No file is edited, and no module is written for it. As in upstream_slime.py, losses, gradient norms
and log-probabilities of four GRPO steps in fp32 agree up to rounding.
"""

from __future__ import annotations

import pytest
import slime_newest_runs as runs
import upstream_slime
from upstream_slime import DELTA_NET, VISION


@pytest.mark.parametrize("devices", [1, 2])
def test_text(devices, folder, truth):
    found = runs.run(folder, "npu_ops", "qwen3", devices)
    upstream_slime.agree(found, truth("qwen3"))
    assert len(found.calls) == devices
    upstream_slime.called(found, upstream_slime.OPERATORS)


@pytest.mark.parametrize(
    "model, devices, operators",
    [("qwen3_5", 1, DELTA_NET), ("qwen3_5", 2, DELTA_NET), ("qwen3_5_vl", 1, DELTA_NET + VISION)],
)
def test_gated_delta_net(model, devices, operators, folder, truth):
    """Qwen3.5 by slime's plugins: text, also sequence parallel, and a picture in each answer."""
    found = runs.run(folder, "npu_ops", model, devices)
    upstream_slime.agree(found, truth(model), upstream_slime.CLOSE_AFTER_UPDATES)
    assert len(found.calls) == devices
    upstream_slime.called(found, upstream_slime.OPERATORS + operators)


@pytest.mark.parametrize(
    "model, operators", [("qwen3_vl", VISION), ("qwen3_vl-text", ())], ids=["pictures", "text"]
)
def test_provider(model, operators, folder, truth):
    """Megatron-Bridge's Qwen3-VL, built by npu-ops's function for --spec."""
    found = runs.run(folder, "npu_ops", model)
    upstream_slime.agree(found, truth(model))
    upstream_slime.called(found, upstream_slime.OPERATORS + operators)
