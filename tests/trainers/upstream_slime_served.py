"""Test slime of August 2026 with SGLang's engine as rollout: its own train.py on the emulated NPU.

    python tests/trainers/fetch_slime.py slime Megatron-LM MindSpeed
    python tests/trainers/fetch_slime_newest.py slime Megatron-LM MindSpeed
    python -m pytest tests/trainers/upstream_slime_served.py

Whole GRPO steps: the engine answers, Megatron trains, and the engine gets the new weights. No file
is edited, and the only module written for it is the reward.
"""

from __future__ import annotations

import pytest
import slime_newest_runs
import slime_served_runs as runs
import upstream_slime

ROUNDING = 2e-6  # for fp32 log-probabilities of about 6


def apart(found) -> list[float]:
    """Return each step's difference of log-probabilities from the engine's.

    Also check that the second rollout has new weights.
    """
    first, second = found.rollouts
    assert first["rollout/log_probs"] == first["rollout/ref_log_probs"]
    assert second["rollout/log_probs"] != second["rollout/ref_log_probs"]
    upstream_slime.called(found, upstream_slime.OPERATORS)
    return [step[runs.APART] for step in found.steps]


@pytest.mark.parametrize("model", runs.MODELS)
def test_in_consistent_mode_the_engine_has_the_trainers_numbers(model, folder):
    found, _ = runs.run(folder, model, "bfloat16", consistent=True)
    assert apart(found) == [0.0] * 4


def test_on_the_same_device(folder):
    """Weights go to the engine through files, as the emulated NPU has no IPC."""
    found, _ = runs.run(folder, "qwen3", "bfloat16", consistent=True, colocated=True)
    assert apart(found) == [0.0] * 4


def test_from_its_answers_the_cpu_learns_the_same(folder):
    found, rollouts = runs.run(folder, "qwen3", "float32", consistent=False)
    assert max(apart(found)) < ROUNDING
    truth = slime_newest_runs.run(folder, "truth", "qwen3", rollouts=rollouts)
    upstream_slime.agree(found, truth)
